"""Is the faster kernel of linear layers the same product, and used only where it may be?"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from kvlens.linear import _OneDnnLinear, default_linear, fast_linear, kernel

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"),
    reason="this PyTorch has no oneDNN linear",
)


@pytest.mark.parametrize("shape", [(5, 24), (2, 7, 24), (1, 1, 24), (0, 24)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_product_is_as_exact_as_the_default_one(shape: tuple[int, ...], with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    states, weight = torch.randn(shape, generator=generator), torch.randn(9, 24, generator=generator)
    bias = torch.randn(9, generator=generator) if with_bias else None
    with torch.inference_mode(), _OneDnnLinear():
        found = linear(states, weight, bias)
    truth = linear(states.double(), weight.double(), None if bias is None else bias.double())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), truth, atol=1e-5, rtol=0)


def test_gradients_and_half_precision_go_the_usual_way() -> None:
    weight = torch.randn(3, 4, requires_grad=True)
    with _OneDnnLinear():
        linear(torch.randn(2, 4), weight).sum().backward()
        half = linear(torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(3, 4, dtype=torch.bfloat16))
    assert weight.grad is not None
    assert half.dtype == torch.bfloat16
    assert half.tolist() == [[4.0] * 3] * 2


def test_modules_are_reached_inside_the_context_and_only_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlens.linear.kernel", lambda: "oneDNN")
    layer = torch.nn.Linear(64, 64)
    states = torch.randn(16, 64)
    with torch.profiler.profile() as outside, torch.inference_mode():
        layer(states)
    with torch.profiler.profile() as inside, torch.inference_mode(), fast_linear():
        layer(states)

    def used(profile: torch.profiler.profile) -> bool:
        return any("_linear_pointwise" in event.name for event in profile.events())

    assert used(inside)
    assert not used(outside)


def test_the_default_kernel_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlens.linear.kernel", lambda: "oneDNN")
    with default_linear():
        assert not isinstance(fast_linear(), _OneDnnLinear)
        with pytest.raises(RuntimeError), default_linear():
            raise RuntimeError
        assert not isinstance(fast_linear(), _OneDnnLinear)
    assert isinstance(fast_linear(), _OneDnnLinear)


def test_the_choice_is_the_same_every_time() -> None:
    assert kernel() in ("oneDNN", "default")
    assert kernel() == kernel()
