"""Read a pickle without running it: what it would build, as inert nodes.

A checkpoint's pickle is a program, and `inspect` and `verify` are for files that nobody trusts yet. Even an `Unpickler` whose
`find_class` gives stubs can be made to hurt: seven bytes of LONG_BINPUT made CPython 3.11 fill a memo of 4 GiB for ten
seconds, and a dict key of nested tuples is hashed recursively, without a limit, in C. So the opcodes are followed here,
symbolically. Nothing is imported, called, hashed or compared; memory and time are linear in the pickle's bytes.
"""
from __future__ import annotations

import pickletools
from dataclasses import dataclass, field

from ..errors import ArchiveError

MAX_OPCODES = 1 << 26  # a tensor takes some 40; bounds what a hostile file costs


@dataclass(frozen=True, eq=False)
class Global:
    """A name that the pickle would import."""
    module: str
    name: str

    def __str__(self):
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, eq=False)
class Persistent:
    """A reference to something outside the pickle: in torch's files a tuple ("storage", class, record key, location, numel)."""
    id: object


@dataclass(eq=False)
class Call:
    """What the pickle would get by calling `func(*args)`, setting `state`, appending `items` and storing `pairs`."""
    func: object
    args: object
    state: object = None
    items: list = field(default_factory=list)
    pairs: list = field(default_factory=list)


@dataclass(eq=False)
class Dict:
    """Pairs in the order they are stored, not hashed; a key may come twice, and the later one counts."""
    pairs: list = field(default_factory=list)

    def get(self, key):
        """The value under a plain str, int or None key, None where there is none."""
        return next((v for k, v in reversed(self.pairs) if type(k) is type(key) and k == key), None)


@dataclass(eq=False)
class Items:
    """A list, set or frozenset."""
    items: list = field(default_factory=list)


class _Mark:
    pass


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY = {"EMPTY_DICT": Dict, "EMPTY_LIST": Items, "EMPTY_SET": Items}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_VALUES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
    "BYTEARRAY8",
}


def read(data: bytes):
    """The tree that the pickle `data` describes: nodes of this module, tuples, and plain values.

    Raises `ArchiveError` for anything that is not a complete, well-formed pickle.
    """
    try:
        return _run(data)
    except ArchiveError:
        raise
    except Exception as err:  # pickletools, and a stack or memo that holds less than an opcode takes, raise a variety
        raise ArchiveError(f"The pickle is damaged: {type(err).__name__}: {str(err)[:200]}. Restore the file from a "
                           "copy.") from err


def _run(data):
    stack, memo = [], {}

    def pop():
        value = stack.pop()
        if type(value) is _Mark:
            raise ValueError("a mark is where a value should be")
        return value

    def pop_mark():
        values = []
        while type(stack[-1]) is not _Mark:
            values.append(stack.pop())
        stack.pop()
        return values[::-1]

    def store(target, values):
        if len(values) % 2:
            raise ValueError("an odd number of keys and values")
        target.pairs += zip(values[::2], values[1::2])

    for count, (op, arg, _) in enumerate(pickletools.genops(data)):
        if count >= MAX_OPCODES:
            raise ArchiveError(f"The pickle has more than {MAX_OPCODES} opcodes; no checkpoint does. Not read further.")
        name = op.name
        if name in _VALUES:
            stack.append(arg)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[int(arg)] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[int(arg)])
        elif name in _TUPLES:
            n = _TUPLES[name]
            stack.append(tuple([pop() for _ in range(n)][::-1]))
        elif name == "MARK":
            stack.append(_Mark())
        elif name == "TUPLE":
            stack.append(tuple(pop_mark()))
        elif name == "BINPERSID":
            stack.append(Persistent(pop()))
        elif name == "PERSID":
            stack.append(Persistent(arg))
        elif name in ("GLOBAL", "INST"):
            module, _, attribute = arg.partition(" ")
            found = Global(module, attribute)
            stack.append(found if name == "GLOBAL" else Call(found, tuple(pop_mark())))
        elif name == "STACK_GLOBAL":
            attribute, module = pop(), pop()
            if type(attribute) is not str or type(module) is not str:
                raise ValueError("a global is named by something other than strings")
            stack.append(Global(module, attribute))
        elif name in ("REDUCE", "NEWOBJ"):
            args = pop()
            stack.append(Call(pop(), args))
        elif name == "NEWOBJ_EX":
            keywords, args = pop(), pop()
            stack.append(Call(pop(), args, state=keywords))
        elif name == "OBJ":
            func, *args = pop_mark()
            stack.append(Call(func, tuple(args)))
        elif name == "BUILD":
            state = pop()
            if type(stack[-1]) is Call:  # twice is possible, and both may hold tensors
                stack[-1].state = state if stack[-1].state is None else (stack[-1].state, state)
            else:
                raise ValueError("a state is set on something that is no object")
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in ("LIST", "FROZENSET"):
            stack.append(Items(pop_mark()))
        elif name == "DICT":
            values = pop_mark()
            stack.append(Dict())
            store(stack[-1], values)
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            values = [pop()] if name == "APPEND" else pop_mark()
            stack[-1].items.extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            values = [pop(), pop()][::-1] if name == "SETITEM" else pop_mark()
            store(stack[-1], values)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "POP":
            stack.pop()
        elif name == "POP_MARK":
            pop_mark()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "STOP":
            return pop()
        elif name in ("EXT1", "EXT2", "EXT4"):
            stack.append(Global("copyreg", f"extension {arg}"))
        elif name not in ("PROTO", "FRAME"):  # NEXT_BUFFER, READONLY_BUFFER: never in a file
            raise ValueError(f"opcode {name} does not belong in a file")
    raise ValueError("it ends before its end mark")
