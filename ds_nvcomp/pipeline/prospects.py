"""Whether coding is worth a try, learnt from the tiles before.

Of bytes that do not shrink there is usually more where they come from. Coding random bits cost 13 % over storing them raw (Deflate, one
H200), so the next try comes ever later, up to one tile in `MOST`: where numbers follow again, hardly more of them are stored uncoded
than there were random bits before. Zeros are not held against a source: they cost little to try, and numbers often follow them.
"""
from __future__ import annotations

FIRST, MOST = 2, 16


class Prospects:
    """For the tiles of one encoder, in order. `first` and `last` are the numbers of the sources that a tile begins and ends in."""

    def __init__(self):
        self._vain: dict[int, tuple[int, int]] = {}  # source: tiles since one of it was last tried, all in vain; tiles between tries

    def worth(self, first: int, last: int) -> bool:
        """Whether to code the next tile. Each call counts as a tile."""
        if first != last or first not in self._vain:
            return True
        since, between = self._vain[first]
        self._vain[first] = (since + 1) % between, between
        return since + 1 == between

    def learn(self, first: int, last: int, *, gained: int, lost: int) -> None:
        """What came of a tile that was coded: chunks that shrank, and chunks that were not zero and did not shrink."""
        if gained:
            for source in range(first, last + 1):
                self._vain.pop(source, None)
        elif lost and first == last:
            since, between = self._vain.get(first, (0, FIRST // 2))
            self._vain[first] = since, min(2 * between, MOST)
