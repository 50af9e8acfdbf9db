"""Which edges of a captured CUDA graph become programmatic (PDL)."""

from __future__ import annotations

from mingc.runtime.engines.programmatic_launch import _pdl_edges

NAMES = {1: "vendor_gemm", 2: "mingc_a_pdl", 3: "mingc_b_pdl", 4: "mingc_c", 5: "mingc_d_pdl"}


def test_in_a_chain_only_kernels_with_the_suffix_get_programmatic_edges() -> None:
    edges = [(1, 2, True), (2, 3, True), (3, 4, True), (4, 5, True)]
    assert sorted(_pdl_edges(NAMES, edges)) == [(1, 2), (2, 3), (4, 5)]


def test_a_kernel_with_two_predecessors_keeps_ordinary_edges() -> None:
    assert _pdl_edges(NAMES, [(1, 3, True), (2, 3, True)]) == []


def test_both_branches_after_a_fork_get_programmatic_edges() -> None:
    assert sorted(_pdl_edges(NAMES, [(1, 2, True), (1, 3, True)])) == [(1, 2), (1, 3)]


def test_an_edge_from_a_node_that_is_no_kernel_stays_ordinary() -> None:
    copy = 9
    assert _pdl_edges(NAMES, [(copy, 2, True)]) == []


def test_an_edge_that_is_already_programmatic_is_not_changed_again() -> None:
    assert _pdl_edges(NAMES, [(1, 2, False)]) == []
