"""The example server: many clients at once, each gets the images of its own request, bit for bit.

Runs where Ray Serve is (the tox environment ``serve``).
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch

from dlo_core.demo.sampler import sample
from dlo_core.demo.weights import load_model

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("ray.serve", reason="Ray Serve is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SERVER = Path(__file__).resolve().parent.parent / "examples" / "serve_waves.py"
HOST = "127.0.0.1"


def call(port: int, method: str, path: str = "/", body: Any = None, timeout: float = 60) -> Any:
    """Return status and answer of one HTTP call."""
    client = http.client.HTTPConnection(HOST, port, timeout=timeout)
    try:
        text = body if isinstance(body, str) else json.dumps(body)
        client.request(method, path, None if body is None else text)
        answer = client.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        client.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Start the server with a home of its own; afterwards no process of it may be left."""
    port = free_port()
    # A socket's path is short, and pytest's own folders are deep.
    with tempfile.TemporaryDirectory(prefix="dlo") as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            server = subprocess.Popen(
                [sys.executable, str(SERVER), "--port", str(port), "--temp", f"{folder}/ray"],
                env={**os.environ, "HOME": folder, "RAY_USAGE_STATS_ENABLED": "0"},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            deadline = time.monotonic() + 120
            while b"ready on" not in log.read_bytes():
                assert server.poll() is None, log.read_text(errors="replace")
                assert time.monotonic() < deadline, log.read_text(errors="replace")
                time.sleep(0.2)
            yield port
            family = psutil.Process(server.pid).children(recursive=True)
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0, log.read_text(errors="replace")
            _, left = psutil.wait_procs(family, timeout=20)
            assert not left
        finally:
            kill_all(server)


def kill_all(server: subprocess.Popen[bytes]) -> None:
    """Kill the server and all that it started."""
    if server.poll() is None:
        for each in psutil.Process(server.pid).children(recursive=True):
            each.kill()
        server.kill()
        server.wait(10)


def wanted(digits: list[int], steps: int, seed: int) -> str:
    """Return the digest of the images that a plain model draws."""
    torch.set_num_threads(1)
    model = load_model()
    images = sample(model, torch.tensor(digits), seed=seed, num_steps=steps, guidance=2.0)
    return hashlib.sha256(images.numpy().tobytes()).hexdigest()


def test_many_clients_each_get_their_own_bits_and_a_broken_one_harms_nobody(port: int) -> None:
    outcomes: dict[tuple[int, int], tuple[int, Any]] = {}

    def client(number: int) -> None:
        for turn in range(4):
            body = {"digits": [number, turn], "steps": 2 + (number + turn) % 3, "seed": number}
            outcomes[number, turn] = call(port, "POST", body=body)

    def broken() -> None:
        for body in ("nonsense", {"digits": [77], "steps": 3}, {"digits": [1], "steps": 10**6}):
            status, answer = call(port, "POST", body=body)
            assert status == 400
            assert answer["error"]
        for _ in range(3):
            with socket.create_connection((HOST, port)) as gone:
                text = b'{"digits": [1], "steps": 150}'
                gone.sendall(
                    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(text)
                )
                gone.sendall(text)
                time.sleep(0.1)

    began = time.monotonic()
    clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for each in (*clients, threading.Thread(target=broken)):
        each.start()
    for each in clients:
        each.join(120)
    print(f"{len(outcomes)} requests of 4 clients in {time.monotonic() - began:.1f} s")
    assert len(outcomes) == 16
    for (number, turn), (status, answer) in outcomes.items():
        assert status == 200, answer
        assert answer["sha256"] == wanted([number, turn], 2 + (number + turn) % 3, number)


def test_progress_is_seen_and_a_running_request_is_cancelled(port: int) -> None:
    _, answer = call(port, "POST", body={"digits": [5], "steps": 200, "wait": False})
    path = f"/?job={answer['job']}"
    deadline = time.monotonic() + 60
    while (state := call(port, "GET", path)[1])["state"] == "waiting" or not state.get("steps"):
        assert time.monotonic() < deadline
        assert state["state"] in ("waiting", "running")
        time.sleep(0.05)
    assert call(port, "DELETE", path)[1] == {"cancelled": True}
    while (state := call(port, "GET", path)[1])["state"] != "cancelled":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    status, answer = call(port, "POST", body={"digits": [5], "steps": 3, "seed": 4})
    assert (status, answer["sha256"]) == (200, wanted([5], 3, 4))


def test_what_is_not_there_is_said(port: int) -> None:
    assert call(port, "GET", "/?job=none")[0] == 404
    assert call(port, "GET")[0] == 200
