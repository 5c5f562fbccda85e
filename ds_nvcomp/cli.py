"""`ds-nvcomp`: look into, verify, pack and unpack checkpoints; measure what compressing them gains here.

Results go to stdout, progress and errors to stderr. Exit status: 0 done, 1 something is wrong (said in one line), 2 wrong
usage. torch is imported by the commands that need it, so that `--help` is quick.
"""
from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

from . import __version__, costs
from .config import CODECS, DEVICES, VERIFY, Config, explain as explain_config
from .errors import ConfigError, DsNvcompError

app = typer.Typer(name="ds-nvcomp", no_args_is_help=True, add_completion=False, rich_markup_mode="rich",
                  pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]})

_DEFAULT = Config()
Codec = Enum("Codec", {name: name for name in CODECS}, type=str)
Device = Enum("Device", {name: name for name in DEVICES}, type=str)
Verify = Enum("Verify", {name: name for name in VERIFY}, type=str)
Source = Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint: a file, a tag's directory, a whole save_dir or "
                                                            "any tree.")]
Destination = Annotated[Optional[Path], typer.Argument(metavar="[DST]", show_default=False,
                                                       help="Where to write; must not exist. Left out: in place, atomically.")]
NoCheck = Annotated[bool, typer.Option("--no-check", help="Do not read back what was written and compare it bit by bit.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout, sizes in bytes.")]


def main() -> None:
    """The console script."""
    app(prog_name="ds-nvcomp")


def _command(function):
    """Errors as one clean line and exit status 1."""
    @functools.wraps(function)
    def run(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except BrokenPipeError:  # `ds-nvcomp inspect x | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except (DsNvcompError, OSError) as err:
            typer.echo(f"error: {_safe(err)}", err=True)
            raise typer.Exit(1) from None
    return app.command()(run)


def _version(wanted: bool):
    if wanted:
        typer.echo(f"ds-nvcomp {__version__}")
        raise typer.Exit()


@app.callback()
def _app(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and "
                                                                                                   "exit.")] = False):
    """Lossless compression of DeepSpeed, Megatron and PyTorch checkpoints.

    Training writes compressed checkpoints by itself, with a block
    [bold]"nvcomp_checkpoint": {}[/bold] in the DeepSpeed JSON. These commands are for
    checkpoints that exist. Plain torch.load opens packed files wherever
    the package ds_nvcomp is installed.

    [bold]Examples[/bold]

    ds-nvcomp inspect ckpt/step1000   [dim]# what is in it, what it saves[/dim]\n
    ds-nvcomp verify ckpt             [dim]# is every byte as it was written?[/dim]\n
    ds-nvcomp pack ckpt               [dim]# compress older files, in place[/dim]\n
    ds-nvcomp unpack ckpt plain       [dim]# a copy that only torch is needed for[/dim]\n
    ds-nvcomp config --explain        [dim]# every setting of the JSON block[/dim]\n
    ds-nvcomp bench /mnt/ckpt         [dim]# how fast is it here, and which codec?[/dim]
    """


@_command
def inspect(path: Annotated[Path, typer.Argument(metavar="PATH", help="A torch file or a directory of "
                                                                      "them, also a distributed one (DCP, "
                                                                      "Megatron).")], as_json: AsJson = False):
    """Show what files hold, without executing anything in them.

    A line for each tensor of a file or a distributed checkpoint; a line for
    each file of another directory. Only headers are read, so it is quick on
    any size.

    [bold]Examples[/bold]

    ds-nvcomp inspect ckpt/step1000/mp_rank_00_model_states.pt\n
    ds-nvcomp inspect ckpt/iter_0001000   [dim]# Megatron's torch_dist[/dim]\n
    ds-nvcomp inspect ckpt --json | jq '.files[] | {path, ratio}'
    """
    from .archive.scan import scan
    from .checkpoint.distributed import scan_directory
    from .checkpoint.verify import refuse_parts
    refuse_parts(path)
    if path.is_dir():
        scans = [scan_directory(file) if file.is_dir() else scan(file) for file in _torch_files(path)]
        if as_json:
            totals = dict(raw_bytes=sum(s.raw_bytes for s in scans), file_bytes=sum(s.bytes for s in scans))
            _print_json({"path": str(path), **totals, "ratio": _ratio(totals["file_bytes"], totals["raw_bytes"]),
                         "files": [_as_dict(s) for s in scans]})
        elif scans[0].path == str(path):
            _print_tensors(scans[0])
            if scans[1:]:
                typer.echo()
                _print_files(path, scans)
        else:
            _print_files(path, scans)
        return
    scanned = scan(path)
    _print_json(_as_dict(scanned)) if as_json else _print_tensors(scanned)


@_command
def verify(path: Annotated[Path, typer.Argument(metavar="PATH", help="A torch file, a tag's directory, a save_dir or any "
                                                                     "tree.")],
           decode: Annotated[bool, typer.Option("--decode", help="Decode every compressed tensor too, where its codec can "
                                                                 "run.")] = False,
           as_json: AsJson = False):
    """Check that every byte is what was written, and that no file is missing.

    Needs no GPU, executes nothing in the files, and reports all that is
    wrong instead of stopping at the first. Plain torch files are verified
    by the checksums of their zip.

    [bold]Examples[/bold]

    ds-nvcomp verify ckpt && echo good\n
    ds-nvcomp verify ckpt/step1000 --decode
    """
    from .checkpoint import verify as verifier
    tally = verifier.Tally()
    with _bar("Verifying", lambda: verifier.sizes(path)) as advance:
        problems = verifier.verify(path, decode=decode, tally=tally, progress=advance)
    if as_json:
        _print_json({"path": str(path), "ok": not problems, **asdict(tally),
                     "problems": [asdict(problem) for problem in problems]})
    else:
        for problem in problems:
            typer.echo(_safe(problem))
        looked = (f"{_count(tally.files, 'file')}, {_size(tally.bytes)}, {_count(tally.tensors, 'tensor')} "
                  f"({tally.compressed} compressed, {_count(tally.chunks, 'chunk')})")
        typer.echo(f"{_count(len(problems), 'problem')} in {looked}." if problems else f"OK: {looked}, nothing wrong.")
    if tally.opaque:
        typer.echo(f"note: {_count(len(tally.opaque), 'item')} without checksums that ds_nvcomp could verify, such as "
                   f"{_safe(tally.opaque[0])}.", err=True)
    for name in tally.unchecked:
        typer.echo(f"note: {_safe(name)}: torch's format before 1.6, which has no checksums; not verified.", err=True)
    if tally.not_decoded:
        typer.echo(f"note: {_count(len(tally.not_decoded), 'tensor')} not decoded, for their codec cannot run here (it takes "
                   "an NVIDIA GPU); their checksums are verified.", err=True)
    raise typer.Exit(1 if problems else 0)


@_command
def pack(src: Source, dst: Destination = None,
         codec: Annotated[Codec, typer.Option(help="Entropy coder of the exponent bytes.")] = Codec[_DEFAULT.codec],
         device: Annotated[Device, typer.Option(help="Where to encode.")] = Device[_DEFAULT.device],
         threads: Annotated[int, typer.Option(help="CPU threads; 0 takes all cores.")] = _DEFAULT.threads,
         verify: Annotated[Verify, typer.Option(help="encode: decode every chunk again at once and "
                                                     "compare.")] = Verify[_DEFAULT.verify],
         min_bytes: Annotated[int, typer.Option(help="Smaller tensors are left as they are.")] = _DEFAULT.min_bytes,
         chunk_bytes: Annotated[int, typer.Option(help="Bytes of a coded chunk; 0 takes the codec's "
                                                       "best.")] = _DEFAULT.chunk_bytes,
         gpu_memory: Annotated[int, typer.Option(help="GPU work memory, bytes.")] = _DEFAULT.gpu_memory,
         fsync: Annotated[bool, typer.Option(help="Make the result durable before it takes its name.")] = _DEFAULT.fsync,
         all_files: Annotated[bool, typer.Option("--all", help="Compress every torch zip, not only DeepSpeed's "
                                                               "*_states.pt and items of *.distcp.")] = False,
         no_check: NoCheck = False):
    """Compress a checkpoint, bit for bit lossless.

    In a DeepSpeed checkpoint the files named *_states.pt are compressed, as
    in training, and all others copied; in a distributed one (DCP, Megatron's
    torch_dist) the items of *.distcp; elsewhere *.pt, *.pth and *.bin; a
    file given by itself always. Every written file is read back and
    compared with its source before anything is replaced.

    [bold]This executes the files' pickles, as DeepSpeed does when it loads them:
    pack only what you would train from.[/bold] (inspect and verify do not.)

    [bold]Examples[/bold]

    ds-nvcomp pack ckpt                    [dim]# in place, atomically[/dim]\n
    ds-nvcomp pack ckpt ckpt-small         [dim]# into a new directory[/dim]\n
    ds-nvcomp pack ckpt/iter_0001000       [dim]# Megatron's, or any DCP directory[/dim]\n
    ds-nvcomp pack model.pt --codec zstd   [dim]# one file, in place[/dim]\n
    ds-nvcomp pack ckpt --codec deflate    [dim]# from ans, on a GPU machine[/dim]
    """
    from .checkpoint.convert import pack as run
    config = Config(codec=codec.value, device=device.value, threads=threads, verify=verify.value, min_bytes=min_bytes,
                    chunk_bytes=chunk_bytes, gpu_memory=gpu_memory, fsync=fsync)
    with _conversion("Packing") as progress:
        report = run(src, dst, config, all_files=all_files, check=not no_check, progress=progress)
    _print_report("Packed", report)


@_command
def unpack(src: Source, dst: Destination = None, no_check: NoCheck = False):
    """Write a compressed checkpoint as plain torch files again.

    [bold]This executes the files' pickles, as DeepSpeed does when it loads them:
    unpack only what you would train from.[/bold]

    [bold]Examples[/bold]

    ds-nvcomp unpack ckpt plain\n
    ds-nvcomp unpack model.pt
    """
    from .checkpoint.convert import unpack as run
    with _conversion("Unpacking") as progress:
        report = run(src, dst, check=not no_check, progress=progress)
    _print_report("Unpacked", report)


@_command
def config(file: Annotated[Optional[Path], typer.Argument(metavar="[FILE.json]", show_default=False,
                                                          help="A DeepSpeed configuration whose block to validate.")] = None,
           explain: Annotated[bool, typer.Option("--explain", help="Every key, its default, what is allowed and what it "
                                                                   "does.")] = False):
    """Explain the settings, or validate those of a DeepSpeed JSON.

    Prints the values in effect: the defaults, or with a file that file's.

    [bold]Examples[/bold]

    ds-nvcomp config --explain\n
    ds-nvcomp config ds_config.json
    """
    values = _DEFAULT if file is None else _read_block(file)
    if explain:
        table = _table("key", "default", "value here" if file else None, "allowed", "what it does")
        for key, default, allowed, text in explain_config():
            here = [json.dumps(values.as_dict()[key]).strip('"')] if file else []
            table.add_row(*_cells(key, default, *here, allowed, text))
        _console().print(table)
    else:
        _print_json({"nvcomp_checkpoint": values.as_dict()})


def _duration(text: str) -> float:
    try:
        return costs.duration(text)
    except ConfigError as err:
        raise typer.BadParameter(str(err)) from None


def _modelled(kind, name, text, metavar, **more):
    """An option of the cost model."""
    return Annotated[kind, typer.Option(name, help=text, metavar=metavar, rich_help_panel="Cost model", **more)]


@_command
def bench(path: Annotated[Optional[Path], typer.Argument(metavar="[PATH]", show_default=False,
                                                         help="A directory where checkpoints are to be written: its speed is "
                                                              "measured, too, and a codec recommended.")] = None,
          device: Annotated[Device, typer.Option(help="Where to encode.")] = Device[_DEFAULT.device],
          background: Annotated[bool, typer.Option("--async", help="Recommend for saves that are written behind training.")] = False,
          fsync: Annotated[bool, typer.Option(help="Write PATH durably, as saves do.")] = _DEFAULT.fsync,
          as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout; GB are 1e9 bytes, speeds GB/s of raw tensors.")] = False,
          params: _modelled(Optional[float], "--params", "Parameters of the model.", "N", show_default=False) = None,
          gpus: _modelled(Optional[int], "--gpus", "GPUs that wait for a save.", "N", show_default=False) = None,
          bandwidth: _modelled(Optional[float], "--bandwidth", "To storage, of all GPUs together.", "GB/S", show_default=False) = None,
          interval: _modelled(float, "--interval", "From one save's begin to the next one's: 90s, 30m, 2h.", "TIME", parser=_duration)
          = "30m",
          gpu_hour: _modelled(float, "--gpu-hour", "What a GPU costs an hour.", "MONEY") = 4.40,
          bytes_per_param: _modelled(float, "--bytes-per-param", "Of a checkpoint: 14 of ZeRO-1 and 2 with Adam in bf16, 12 of ZeRO-3.",
                                     "N") = costs.BYTES_PER_PARAM):
    """Measure codecs and storage here, recommend a setting, and reckon costs.

    Each codec that can run here encodes and decodes a sample of like-trained
    fp32 and bf16 values. With PATH, a hidden file of up to 256 MiB is written
    there, read back and removed. It takes a few seconds.

    With --params, what checkpoints cost a training job in idle GPUs. That
    alone measures nothing and reckons with a ratio of 0.81, that of a whole
    ZeRO-2 checkpoint. With PATH, too, the recommendation is for a GPU's share
    of the bandwidth, and what was measured of it is reckoned with: the ratio,
    and on a GPU the speed. A month is 30 days.

    [bold]Examples[/bold]

    ds-nvcomp bench                     [dim]# the codecs on this machine[/dim]\n
    ds-nvcomp bench /mnt/ckpt --async   [dim]# which to use for that target?[/dim]\n
    ds-nvcomp bench --params 70e9 --gpus 128 --gpu-hour 4.40 --interval 30m --bandwidth 5
    """
    job = None
    if params is not None:
        if gpus is None or bandwidth is None:
            raise typer.BadParameter("the cost model also takes --gpus and --bandwidth, such as --gpus 128 --bandwidth 5.")
        job = costs.Job(params * bytes_per_param / 1e9, gpus, gpu_hour, interval, bandwidth)
    elif gpus is not None or bandwidth is not None:
        raise typer.BadParameter("--gpus and --bandwidth belong to the cost model, which takes --params, such as --params 70e9.")
    found = None
    if job is None or path is not None:
        from .bench import run
        found = run(path, Config(device=device.value, fsync=fsync, async_=background),
                    **({"share": job.bandwidth / job.gpus} if job else {}))
    figures = {}
    if found and found.choice:
        figures = {"ratio": found.choice.speed.ratio}
        if found.on_gpu:
            figures["snapshot"] = found.choice.speed.encode
    ways = costs.costs(job, **figures) if job else []
    if as_json:
        _print_json({**({"measured": _measured(path, found)} if found else {}),
                     **({"job": asdict(job), "figures": {"ratio": costs.RATIO, "snapshot": costs.SNAPSHOT, **figures},
                         "costs": [asdict(way) for way in ways]} if job else {})})
        return
    if found:
        _print_bench(path, found)
        if job:
            typer.echo()
    if job:
        _print_costs(job, ways, figures)


@_command
def demo(out: Annotated[Optional[Path], typer.Option(metavar="DIR", show_default=False, help="Where to write; a temporary "
                                                                                             "one if left out.")] = None,
         steps: Annotated[int, typer.Option(min=12, help="Training steps.")] = 40,
         device: Annotated[Device, typer.Option(help="Where to train and encode.")] = Device.auto,
         ranks: Annotated[int, typer.Option(min=1, help="Processes to train with.")] = 2,
         keep: Annotated[bool, typer.Option("--keep", help="Keep the checkpoints that it writes.")] = False):
    """Train a small model, save it plain and compressed, resume, compare.

    [bold]Example[/bold]

    ds-nvcomp demo --device cpu --ranks 1
    """
    from .demo.main import run
    raise typer.Exit(run(out=out, steps=steps, device=device.value, ranks=ranks, keep=keep) or 0)


def _read_block(file: Path) -> Config:
    def no_duplicates(pairs):
        keys = [key for key, _ in pairs]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise ConfigError(f"The key {twice!r} is there twice; DeepSpeed refuses that. Remove one.")
        return dict(pairs)

    try:
        parsed = json.loads(file.read_text(), object_pairs_hook=no_duplicates)
        if not isinstance(parsed, dict):
            raise ConfigError(f"A DeepSpeed configuration is a JSON object, found {type(parsed).__name__}.")
        if "nvcomp_checkpoint" not in parsed:
            typer.echo("note: no \"nvcomp_checkpoint\" block in it: checkpoints are written by DeepSpeed's own engine. These "
                       "are the values that an empty block, \"nvcomp_checkpoint\": {}, would have.", err=True)
        return Config.from_dict(parsed.get("nvcomp_checkpoint", {}))
    except (json.JSONDecodeError, UnicodeDecodeError) as err:
        raise ConfigError(f"The file is not JSON: {err}.", path=str(file)) from err
    except ConfigError as err:
        raise err.at(path=str(file))


def _torch_files(directory: Path) -> list[Path]:
    """The torch zips below a directory, and the directories that are distributed checkpoints."""
    from .archive.records import is_torch_zip
    from .checkpoint.distributed import is_distributed
    from .checkpoint.verify import TORCH_SUFFIXES
    from .errors import DirectoryError
    found = []
    for folder, folders, names in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]  # saves that are not finished
        files = (Path(folder) / name for name in names if name.endswith(TORCH_SUFFIXES) and not name.startswith("."))
        found += [file for file in files if is_torch_zip(file)] + ([Path(folder)] if is_distributed(folder) else [])
    if not found:
        raise DirectoryError("No torch zip file (*.pt, *.pth, *.bin) is in this directory, and it is no distributed checkpoint "
                             "(.metadata).", path=str(directory))
    return sorted(found)


# --- Output ---

def _as_dict(scanned) -> dict:
    tensors = []
    items = getattr(scanned, "items", [None] * len(scanned.rows))
    for row, item in zip(scanned.rows, items):
        stored = row.storage
        entry = dict(name=row.name, dtype=row.dtype, shape=row.shape, stride=row.stride, offset=row.offset,
                     location=stored.location, record=stored.record, raw_bytes=row.raw_bytes, stored_bytes=row.stored_bytes,
                     shares=row.shares,
                     compressed=stored.compressed)
        if stored.encoding:
            header = stored.encoding.header
            entry |= dict(codec=stored.encoding.codec.name, codec_revision=header.codec_revision,
                          transform=header.transform.name, chunks=header.chunks, chunk_elements=header.chunk_elements,
                          pieces=stored.encoding.pieces, by=stored.encoding.by)
            if stored.encoding.linked:
                entry |= dict(linked_to=stored.encoding.linked.file, linked_kind=stored.encoding.linked.kind)
        if item:
            entry |= dict(fqn=item.fqn, chunk_offsets=item.offsets, file=item.file, item_offset=item.start, item_bytes=item.length,
                          transforms=item.transforms)
        tensors.append(entry)
    return dict(path=scanned.path, file_bytes=scanned.bytes, raw_bytes=scanned.raw_bytes,
                ratio=_ratio(scanned.bytes, scanned.raw_bytes), globals=scanned.globals, tensors=tensors)


def _print_tensors(scanned):
    table = _table("tensor", "dtype", "shape", ">raw", ">stored", ">ratio", "how")
    for row in scanned.rows:
        stored, how = row.storage, row.storage.how or "as torch stores it"
        if row.shares is not None:
            how = f"shares the storage of {row.shares}"
        elif stored.encoding:
            header, pieces = stored.encoding.header, stored.encoding.pieces
            how = (f"{stored.encoding.codec.name}, {header.transform.name}, {_count(header.chunks, 'chunk')}; pieces: "
                   + ", ".join(f"{n} {kind}" for kind, n in pieces.items() if n))
            if stored.encoding.linked:
                how += f"; difference from the {stored.encoding.linked.kind} weights in {stored.encoding.linked.file}"
        sizes = ("", "", "") if row.shares is not None else (_size(row.raw_bytes), _size(row.stored_bytes),
                                                             _percent(row.stored_bytes, row.raw_bytes))
        table.add_row(*_cells(row.name or "-", row.dtype, "x".join(map(str, row.shape)) or "scalar", *sizes, how))
    console = _console()
    console.print(table)
    writers = sorted({s.encoding.by for s in scanned.storages if s.encoding})
    locations = sorted({s.location for s in scanned.storages} - {""})
    of_files = "files" if hasattr(scanned, "items") else "a file"
    typer.echo(f"\n{_safe(scanned.path)}: {_count(len(scanned.rows), 'tensor')} on "
               f"{_safe(', '.join(locations) or 'no device')}, {_size(scanned.raw_bytes)} in {of_files} of "
               f"{_size(scanned.bytes)} ({_percent(scanned.bytes, scanned.raw_bytes)})"
               + (f", written by {_safe(', '.join(writers))}" if writers else ", not compressed"))


def _print_files(root, scans):
    table = _table("file", ">tensors", ">raw", ">stored", ">ratio", "codec")
    for scanned in scans:
        codecs = sorted({s.encoding.codec.name if s.encoding else s.how for s in scanned.storages if s.encoding or s.how})
        table.add_row(*_cells(os.path.relpath(scanned.path, root), str(len(scanned.rows)), _size(scanned.raw_bytes),
                              _size(scanned.bytes), _percent(scanned.bytes, scanned.raw_bytes),
                              ", ".join(codecs) or "not compressed"))
    _console().print(table)
    raw, stored = sum(s.raw_bytes for s in scans), sum(s.bytes for s in scans)
    typer.echo(f"\n{_safe(root)}: {_count(len(scans), 'file')}, {_size(raw)} of tensors in {_size(stored)} "
               f"({_percent(stored, raw)})")


def _print_report(done, report):
    before, after = report.bytes_before, report.bytes_after
    typer.echo(f"{done} {_count(len(report.converted), 'file')}, copied {report.copied}: {_size(before)} -> {_size(after)} "
               f"({_percent(after, before)}) in {_safe(report.destination)}")


def _measured(path, found) -> dict:
    chosen = found.choice and {key: getattr(found.choice.speed, key) for key in ("codec", "chunk_bytes", "threads")}
    return {"device": found.device, "copy_to_host": found.copy, "codecs": [asdict(speed) for speed in found.speeds],
            "path": found.disk and {"path": str(path), **asdict(found.disk)},
            "recommendation": chosen and {**chosen, "reason": found.choice.reason}}


def _print_bench(path, found):
    table = _table("codec", ">chunk", None if found.on_gpu else ">threads", ">ratio", ">encode GB/s", ">decode GB/s")
    for speed in found.speeds:
        threads = [] if found.on_gpu else [str(speed.threads or "all")]
        table.add_row(*_cells(speed.codec, _size(speed.chunk_bytes), *threads, f"{speed.ratio:.3f}", f"{speed.encode:.3g}",
                              f"{speed.decode:.3g}"))
    typer.echo(f"{found.device}, like-trained fp32 and bf16" + (f"; copies to the host {found.copy:.3g} GB/s" if found.copy else ""))
    _console().print(table)
    if found.disk:
        how = "made durable" if found.disk.fsync else "not made durable"
        typer.echo(f"\n{_safe(path)}: writes {found.disk.write:.3g} GB/s, {how}, reads {found.disk.read:.3g} GB/s "
                   f"(one process, {_size(found.disk.bytes)})\nrecommended: {found.choice.reason}")


def _print_costs(job, ways, figures):
    typer.echo(f"A checkpoint of {job.checkpoint:,.0f} GB by {_count(job.gpus, 'GPU')} every {job.interval:g} s to storage of "
               f"{job.bandwidth:g} GB/s; ratio {figures.get('ratio', costs.RATIO):.3g}, "
               f"{'measured here' if figures else 'as measured on a whole ZeRO-2 checkpoint'}")
    table = _table("way", ">GB stored", ">s a save", ">s GPUs wait", ">saves a month", ">idle GPU hours a month", ">money a month")
    for way in ways:
        table.add_row(*_cells(way.way, f"{way.stored:,.0f}", f"{way.save_seconds:,.1f}", f"{way.stall_seconds:,.2f}",
                              f"{way.saves:,.0f}", f"{way.gpu_hours:,.0f}", f"{way.money:,.0f}"))
    _console().print(table)


def _console():
    from rich.console import Console
    return Console() if sys.stdout.isatty() else Console(width=240)  # not cut where a program or a file reads it


def _table(*columns):
    from rich.table import Table
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in filter(None, columns):
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold",
                         no_wrap=column.startswith(">"))
    return table


def _cells(*texts):
    from rich.text import Text
    return [Text(_safe(text)) for text in texts]  # a tensor may be called [red], or hold an escape sequence


def _safe(text) -> str:
    """Printable on one line, whatever a file says."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in str(text))


def _print_json(value):
    typer.echo(json.dumps(value, indent=2))


def _size(n: int) -> str:
    if n < 1024:
        return f"{n} B"
    value, unit = float(n), "B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if value < 1024:
            break
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def _ratio(stored: int, raw: int) -> float | None:
    return round(stored / raw, 4) if raw else None


def _percent(stored: int, raw: int) -> str:
    return f"{100 * stored / raw:.1f} %" if raw else "-"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


@contextlib.contextmanager
def _bar(text, total):
    """A progress bar on stderr where that is a terminal; yields `advance(bytes)`."""
    if not sys.stderr.isatty():
        yield lambda stored_bytes: None
        return
    with _progress() as progress:
        task = progress.add_task(text, total=total())
        yield lambda stored_bytes: progress.advance(task, stored_bytes)


def _progress():
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    return Progress(TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(binary_units=True),
                    TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True)


@contextlib.contextmanager
def _conversion(text):
    """A `checkpoint.convert.Progress` that draws a bar, or None."""
    if not sys.stderr.isatty():
        yield None
        return
    from .checkpoint.convert import Progress as Listener
    with _progress() as progress:
        task = progress.add_task(text, total=None)

        class Bar(Listener):
            def total(self, stored_bytes):
                progress.update(task, total=stored_bytes)

            def file(self, name):
                progress.update(task, description=f"{text} {_safe(name)}")

            def advance(self, stored_bytes):
                progress.advance(task, stored_bytes)

        yield Bar()
