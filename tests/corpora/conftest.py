import socket

import pytest


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """No test here reaches the network: what would is an error at once."""

    def refuse(self, address):
        raise OSError(f"a test asked the network for {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
