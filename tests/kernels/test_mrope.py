"""Rotary embedding with three position rows (spec: thinker.md §3)."""

import torch

from mingc.kernels.mrope import apply_rope, mrope_cos_sin

INV_FREQ = 1.0 / 2.4e6 ** (torch.arange(0, 64, 2).float() / 64)
ROWS = torch.tensor([1, 2] * 12 + [0] * 8)


def test_each_frequency_follows_its_row() -> None:
    positions = torch.tensor([[5, 7], [11, -3], [2, 40]])
    cos, sin = mrope_cos_sin(positions, INV_FREQ, ROWS)
    for token in range(2):
        for index in range(32):
            angle = positions[ROWS[index], token].float() * INV_FREQ[index]
            torch.testing.assert_close(cos[token, index], angle.cos(), rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(sin[token, index], angle.sin(), rtol=1e-6, atol=1e-7)


def test_equal_rows_are_ordinary_half_rotary() -> None:
    x = torch.randn(6, 2, 128, generator=torch.Generator().manual_seed(1))
    places = torch.arange(100, 106)
    got = apply_rope(x, *mrope_cos_sin(places.expand(3, -1), INV_FREQ, ROWS))
    angles = places[:, None].double() * INV_FREQ.double()
    turned = torch.complex(x[..., :32].double(), x[..., 32:64].double()) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    expected = torch.cat((turned.real.float(), turned.imag.float(), x[..., 64:]), dim=-1)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_rest_of_the_head_passes_through_bit_for_bit() -> None:
    x = torch.randn(3, 1, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    got = apply_rope(x, *mrope_cos_sin(torch.arange(3).expand(3, -1), INV_FREQ, ROWS))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got[..., 64:], x[..., 64:])
    assert torch.equal(got[0], x[0])  # position 0 turns nothing
