"""The check of matrix descriptors, on code as ptxas writes it."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from wgmma_descriptors import unset_descriptors

START = """
        /*0010*/                   USHF.R.U32.HI UR20, URZ, 0x4, UR13 ;
        /*0020*/                   USGXT.U32 UR20, UR20, 0xe ;
        /*0030*/                   UMOV UR15, 0x80000020 ;
        /*0040*/                   UMOV UR14, UR20 ;
        /*0050*/              @P4 BRA `(.L_x_18) ;
"""
FIRST = """
        /*0100*/                   HGMMA.64x32x16.F32.BF16 R24, R80, gdesc[UR12].tnspB, RZ, !UPT ;
"""
NEXT = """
        /*0110*/                   UIADD3 UR18, UP1, UR18, 0x2, URZ ;
        /*0120*/                   UIADD3.X UR19, UR19, -0x7fffffe0, URZ, UP1, !UPT ;
        /*0130*/                   UIADD3.64 UR10, UR18, 0x3e, URZ ;
        /*0140*/                   HGMMA.64x32x16.F32.BF16 R24, R76, gdesc[UR8].tnspB, R24 ;
"""
COPY = """
        /*0060*/                   UMOV UR18, UR20 ;
        /*0070*/                   UMOV UR19, URZ ;
"""
SMALL = """
        /*0060*/                   UMOV UR15, 0x80000000 ;
        /*0070*/                   HGMMA.64x8x16.F32.BF16 R84, R80, gdesc[UR12], R84 ;
"""
JOIN = ".L_x_18:\n"


@pytest.mark.parametrize(
    ("code", "wrong"),
    [
        (START + JOIN + FIRST, 0),
        (START + JOIN + COPY + FIRST + NEXT, 0),
        (START + JOIN + SMALL, 0),  # the stride of the only 8 columns is 0
        (START + JOIN + FIRST + NEXT, 1),  # UR18 and UR19 are added to and were never set
        (START + COPY + JOIN + FIRST + NEXT, 1),  # they are set on one of two paths
    ],
    ids=["first", "copied", "8 columns", "never set", "set on one path"],
)
def test_descriptors_that_no_path_sets_are_found(code: str, wrong: int) -> None:
    found = unset_descriptors(code)
    assert len(found) == wrong, found
    assert all("gdesc[UR8]" in each for each in found)
