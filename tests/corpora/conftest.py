import runpy
import socket
import sys

import pytest


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """No test here reaches the network: what would is an error at once."""

    def refuse(self, address):
        raise OSError(f"a test asked the network for {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def run(monkeypatch):
    """`python -m lab corpus ..` in this process."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["corpus", *args])
        runpy.run_module("lab.corpora", run_name="__main__", alter_sys=True)

    return run
