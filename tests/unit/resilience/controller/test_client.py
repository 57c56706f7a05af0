"""A controller that does not answer."""

from __future__ import annotations

import socket

import pytest

from megatron.resilience.controller.client import ClientError, ControllerClient
from megatron.resilience.protocol.messages import AskStatus


def test_one_that_is_there_and_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = ControllerClient(where=f"127.0.0.1:{server.getsockname()[1]}", token="t")
        with pytest.raises(ClientError, match="Deadline Exceeded; expected an answer in 0 s"):
            list(client.ask(AskStatus(), patience_s=0.0, answer_s=0.2, retry=lambda: None))
