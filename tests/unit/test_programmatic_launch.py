"""Which edges of a captured graph let a kernel begin early."""

from __future__ import annotations

from mingc.runtime.engines.programmatic_launch import _early_pairs

NAMES = {1: "vendor_product", 2: "mingc_a_early", 3: "mingc_b_early", 4: "mingc_c", 5: "mingc_d_early"}


def test_a_chain_lets_only_kernels_named_so_begin_early() -> None:
    edges = [(1, 2, True), (2, 3, True), (3, 4, True), (4, 5, True)]
    assert sorted(_early_pairs(NAMES, edges)) == [(1, 2), (2, 3), (4, 5)]


def test_a_kernel_behind_two_others_waits_for_both() -> None:
    assert _early_pairs(NAMES, [(1, 3, True), (2, 3, True)]) == []


def test_behind_a_fork_each_branch_begins_early() -> None:
    assert sorted(_early_pairs(NAMES, [(1, 2, True), (1, 3, True)])) == [(1, 2), (1, 3)]


def test_a_kernel_behind_what_is_no_kernel_waits() -> None:
    copy = 9
    assert _early_pairs(NAMES, [(copy, 2, True)]) == []


def test_edges_that_are_not_ordinary_stay_as_they_are() -> None:
    assert _early_pairs(NAMES, [(1, 2, False)]) == []
