"""Which transport is used, and the reason that is given for it."""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Callable

import pytest

from laminar.errors import UserError
from laminar.weights import transport, ucx_library
from laminar.weights.transport import choose, installed
from tests.live import laminar_flow

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes this machine one with some libraries, and a UCX with some transports."""

    def make(*modules: str, transports: tuple[str, ...] = ("self", "tcp"), broken: str = "") -> None:
        def describe() -> ucx_library.Description:
            if broken:
                raise ImportError(broken)
            return ucx_library.Description(
                "1.21.0", transports, any(name.startswith(ucx_library.RDMA) for name in transports)
            )

        monkeypatch.delenv("LAMINAR_TRANSPORT", raising=False)
        monkeypatch.setattr(transport, "_found", lambda module: module in modules)
        monkeypatch.setattr(ucx_library, "describe", describe)

    return make


def test_where_wheels_of_ucxx_exist_the_tests_run_over_ucx_too() -> None:
    if sys.platform == "linux" and platform.machine() == "x86_64":
        assert installed() == ["tcp", "ucx"]


@pytest.mark.skipif("ucx" not in installed(), reason="ucxx is not installed")
def test_the_ucx_of_the_wheel_has_tcp_and_shared_memory_and_no_rdma() -> None:
    found = ucx_library.describe()
    assert {"tcp", "posix", "sysv"} <= set(found.transports)
    assert not found.rdma


@pytest.mark.parametrize(
    ("modules", "transports", "wanted", "name", "why"),
    [
        ((), (), "", "tcp", "ucxx is not installed"),
        ((), (), "tcp", "tcp", "asked for"),
        (("ucxx",), ("self", "tcp"), "", "tcp", "UCX 1.21.0 has self, tcp, no RDMA: without it sockets are faster"),
        (("ucxx",), ("rc_mlx5", "tcp"), "", "ucx", "UCX 1.21.0 has rc_mlx5, tcp"),
        (("ucxx",), ("rc_mlx5", "tcp"), "tcp", "tcp", "asked for; UCX 1.21.0 has rc_mlx5, tcp"),
        (("ucxx",), ("tcp",), "ucx", "ucx", "asked for; UCX 1.21.0 has tcp, no RDMA"),
        (("ucxx",), ("tcp",), "ucx-py", "ucx", "asked for; UCX 1.21.0 has tcp, no RDMA"),
    ],
)
def test_the_transport_follows_from_what_is_here_and_what_is_asked_for(
    machine: Machine, modules: tuple[str, ...], transports: tuple[str, ...], wanted: str, name: str, why: str
) -> None:
    machine(*modules, transports=transports)
    choice = choose(wanted)
    assert (choice.name, choice.why) == (name, why)


def test_the_variable_asks_for_a_transport_too(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("ucxx")
    monkeypatch.setenv("LAMINAR_TRANSPORT", "ucx")
    assert choose().name == "ucx"


def test_where_ucx_py_is_installed_it_is_said_what_is_used_instead(machine: Machine) -> None:
    machine("ucp")
    assert choose().why == "ucxx is not installed; ucx-py, its predecessor, is here but archived and not used"
    with pytest.raises(UserError, match=r"`ucx-py`: ucxx is not installed; .* archived .* 'laminar-flow\[ucx\]'"):
        choose("ucx-py")
    machine("ucp", "ucxx")
    assert choose("ucx-py").name == "ucx"
    assert choose("ucx-py").why.endswith("ucx-py, its predecessor, is here but archived and not used")


@pytest.mark.parametrize("wanted", ["", "tcp"])
def test_a_ucxx_that_does_not_load_is_left_alone(machine: Machine, wanted: str) -> None:
    machine("ucxx", broken="UCX 1.13 is too old")
    assert choose(wanted).name == "tcp"


def test_a_ucxx_that_does_not_load_and_is_asked_for_is_an_error(machine: Machine) -> None:
    machine("ucxx", broken="UCX 1.13 is too old")
    assert choose().why == "ucxx is here but does not load: UCX 1.13 is too old"
    with pytest.raises(UserError, match=r"`ucx`: ucxx is here but does not load: UCX 1\.13 is too old; use tcp"):
        choose("ucx")


def test_a_transport_that_is_unknown_or_not_installed_is_said_so(machine: Machine) -> None:
    machine()
    with pytest.raises(UserError, match="there is no transport `pigeon`; there are: tcp, ucx"):
        choose("pigeon")
    with pytest.raises(UserError, match=r"pip install 'laminar-flow\[ucx\]'"):
        choose("ucx")


@pytest.mark.skipif("ucx" not in installed(), reason="ucxx is not installed")
def test_check_says_which_transport_is_used_and_what_was_found() -> None:
    done = laminar_flow("check", "flows/quickstart.py", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)["weights"]
    assert said["transport"] == "tcp"
    assert re.fullmatch(
        r"UCX [\d.]+ has .*posix, .*sysv, .*tcp.*, no RDMA: without it sockets are faster", said["because"]
    )
