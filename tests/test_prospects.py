"""What is tried again, and when."""
import re

from hypothesis import given, strategies as st

from ds_nvcomp.pipeline.prospects import MOST, Prospects


def coded(tiles: str, ahead: int = 2) -> str:
    """Which tiles of one source are coded, `x` or `-`; of r(andom), n(umbers), z(eros). What comes of a tile is known `ahead` tiles later."""
    prospects, tried = Prospects(), ""
    for i in range(len(tiles) + ahead):
        if i >= ahead and tried[i - ahead] == "x":
            prospects.learn(0, 0, gained=int(tiles[i - ahead] == "n"), lost=int(tiles[i - ahead] == "r"))
        if i < len(tiles):
            tried += "x" if prospects.worth(0, 0) else "-"
    return tried


def test_random_bits_are_tried_ever_more_rarely():
    assert coded("r" * 48) == "xx---x-------x---------------x---------------x--"


def test_numbers_and_zeros_always():
    assert coded("n" * 9) == "x" * 9 and coded("z" * 9 + "n" * 9) == "x" * 18 and coded("nnzznnzz") == "x" * 8


@given(st.text("rnz", max_size=90))
def test_few_tiles_of_numbers_are_lost(tiles):
    tried = coded(tiles)
    runs = [run for run in re.finditer("n+", tiles) if "-" in tried[run.start():run.end()]]
    for run in runs:  # what is known late is tried late
        lost = tried[run.start():run.end()].count("-")
        assert lost <= MOST + 1 and lost <= tiles[:run.start()].count("r") + 3
    assert tried[:2] == "x" * len(tiles[:2])


def test_random_bits_before_numbers():
    assert coded("r" * 8 + "n" * 30) == "xx---x-------x-" + "x" * 23


def test_sources_do_not_speak_for_each_other():
    prospects = Prospects()
    prospects.learn(0, 0, gained=0, lost=5)
    assert prospects.worth(1, 1) and prospects.worth(0, 1) and not prospects.worth(0, 0)
    prospects.learn(0, 2, gained=0, lost=5)  # of several sources: nobody knows whose
    assert prospects.worth(1, 1)
    prospects.learn(0, 1, gained=1, lost=5)
    assert prospects.worth(0, 0)
