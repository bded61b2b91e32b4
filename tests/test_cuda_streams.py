"""CUDA's streams by their short ways, over a stand-in for torch's innermost functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

streams = pytest.importorskip("dlo_cuda.streams")

from dlo_cuda.streams import Current, StreamOfDlo, Streams  # noqa: E402


class Driver:
    """The current device and stream, as torch keeps them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = 0
        self.current: tuple[int, ...] = (0, 0, 1)
        self.made: list[dict[str, int]] = []
        monkeypatch.setattr(streams, "_get_stream", lambda index: self.current)
        monkeypatch.setattr(streams, "_set_stream", self.set_stream)
        monkeypatch.setattr(streams, "_get_device", lambda: self.device)
        monkeypatch.setattr(streams, "_stream", self.make)

    def set_stream(self, *stream: int) -> None:
        self.current = stream

    def make(self, **known: int) -> Any:
        self.made.append(known)
        given = {"stream_id": 7, "device_index": 0, "device_type": 1} | known
        return SimpleNamespace(**given)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def test_the_same_stream_is_the_same_object_and_another_one_is_not(driver: Driver) -> None:
    known = Streams(0)
    first = known.current()
    assert known.current() is first
    assert len(driver.made) == 1
    driver.current = (5, 0, 1)
    assert known.current() is not first
    assert known.current().stream_id == 5
    made = known.new(priority=-1)
    driver.current = (7, 0, 1)
    assert known.current() is made


def test_a_context_puts_back_what_was_current_also_nested_and_after_an_error(
    driver: Driver,
) -> None:
    # A stream of somebody else's, known by its address.
    driver.current = (0x7F00, 0, 1)
    known = Streams(0)
    side = SimpleNamespace(stream_id=3, device_index=0, device_type=1)
    other = SimpleNamespace(stream_id=4, device_index=0, device_type=1)

    def work() -> None:
        with known.made_current(side):
            assert driver.current == (3, 0, 1)
            with known.made_current(other):
                assert driver.current == (4, 0, 1)
            assert driver.current == (3, 0, 1)
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert driver.current == (0x7F00, 0, 1)


def test_on_another_device_torch_puts_both_back(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.stream", lambda stream: ("torch's own", stream))
    side: Any = SimpleNamespace(stream_id=3, device_index=0, device_type=1)
    assert isinstance(Streams(0).made_current(side), Current)
    driver.device = 1
    assert Streams(0).made_current(side) == ("torch's own", side)


def test_events_are_recorded_and_waited_for_on_the_stream_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(streams, "_record", lambda *args: said.append(("record", *args)))
    monkeypatch.setattr(streams, "_wait", lambda *args: said.append(("wait", *args)))
    side: Any = SimpleNamespace()
    assert StreamOfDlo.record_event(side, "event") == "event"
    StreamOfDlo.wait_event(side, "event")
    assert said == [("record", "event", side), ("wait", "event", side)]
