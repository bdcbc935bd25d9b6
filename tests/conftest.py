"""What every test runs under: shapes and types checked at run time, no network, the default model loaded once."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

# Before anything imports huggingface_hub, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"

import jaxtyping
import pytest

# Before anything imports kvlens: every function then checks its signature's types and shapes.
jaxtyping.install_import_hook("kvlens", "beartype.beartype")

if TYPE_CHECKING:
    from kvlens.model import Model

LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0")


class NetworkRefused(OSError):
    """A test tried to leave this machine."""


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuses connections and name look-ups beyond this machine; session fixtures are set up outside it."""

    def refuse_unless_local(host: object) -> None:
        if host is not None and not str(host).startswith(LOOPBACK):
            raise NetworkRefused(f"tests do not use the network, refused: {host}")

    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def guarded_connect(self: socket.socket, address: object) -> None:
        if self.family != socket.AF_UNIX:
            refuse_unless_local(address[0] if isinstance(address, tuple) else address)
        connect(self, address)  # type: ignore[arg-type]

    def guarded_look_up(host: object, *args: object, **kwargs: object) -> object:
        refuse_unless_local(host)
        return look_up(host, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    monkeypatch.setattr(socket, "getaddrinfo", guarded_look_up)


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The default model on the CPU in float32, fetched on its first use on a machine."""
    from kvlens import model

    return model.load("smollm2-135m", device="cpu", dtype="float32")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips `gpu` tests where there is no GPU."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
