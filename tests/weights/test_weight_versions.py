"""A version from the trainer's tensors through shared memory to a replica's views, and what is refused on the way."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

import pytest
import torch

from laminar.errors import LaminarError
from laminar.weights.layout import Layout, TensorSpec
from laminar.weights.owner import SegmentOwner
from laminar.weights.publisher import Publisher
from laminar.weights.reader import WeightReader
from laminar.weights.segment import remove_segments
from laminar.weights.tensors import digest_of
from tests.weights.segments import publisher_of


def tensors(value: float = 1.0) -> dict[str, torch.Tensor]:
    """A model's worth of oddities: every kind of dtype, no elements, no dimensions, not contiguous."""
    base = torch.arange(600, dtype=torch.float32) + value
    return {
        "q_proj.weight": base.view(30, 20),
        "half": base.to(torch.bfloat16),
        "eighth": (base / 10).to(torch.float8_e4m3fn),
        "transposed": base.view(20, 30).T,
        "k_proj.weight": base.view(30, 20) * 2,
        "v_proj.weight": base.view(30, 20) * 3,
        "scalar": torch.tensor(float(value)),
        "none": torch.empty(0, 3),
        "mask": base > 300,
        "parameter": torch.nn.Parameter(base.clone()),
    }


LAYOUT = Layout.of(tensors(), chunk_bytes=1024)
publish = publisher_of(tensors)


def flip_a_byte_of(root: Path, version: int) -> None:
    """Damage a version where it lies, as a stray write would."""
    needle = torch.tensor(float(version)).numpy().tobytes()  # the tensor "scalar"
    spec = LAYOUT.by_name["scalar"]
    hits = 0
    for path in sorted(root.glob("slot*")):
        with path.open("r+b") as file:
            start = file.seek(0, os.SEEK_END) - LAYOUT.nbytes + spec.offset
            file.seek(start)
            if file.read(4) == needle:
                file.seek(start)
                file.write(bytes([needle[0] ^ 1]))
                hits += 1
    assert hits == 1


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left.float(), right.float())


def test_what_a_replica_pulls_is_what_the_trainer_published(owner: SegmentOwner) -> None:
    published = Publisher(owner.root).publish(3, tensors(3))
    promoted = owner.promote(3)
    with WeightReader(owner.root).pull() as pulled:
        assert pulled.version == 3
        assert pulled.tensors.keys() == tensors().keys()
        for name, tensor in tensors(3).items():
            assert same(pulled.tensors[name], tensor), name
        assert pulled.digest == published.digest == promoted.digest
        assert digest_of(pulled.tensors, LAYOUT) == pulled.digest
    assert published.nbytes == LAYOUT.nbytes


def test_pulled_tensors_are_views_of_the_shared_memory(owner: SegmentOwner) -> None:
    publish(owner, 1)
    with WeightReader(owner.root).pull() as pulled:
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        ours = [f[0].split("-") for f in maps if f[-1].startswith(f"{owner.root}/slot") and f[1].startswith("r--s")]
        spans = [(int(start, 16), int(stop, 16)) for start, stop in ours]
        for tensor in pulled.tensors.values():
            if tensor.numel():
                assert any(start <= tensor.data_ptr() < stop for start, stop in spans)


def test_the_digest_of_the_same_bytes_is_the_published_one_and_of_others_is_not(owner: SegmentOwner) -> None:
    published = Publisher(owner.root).publish(1, tensors(1))
    served = {name: tensor.clone() for name, tensor in tensors(1).items()}
    assert digest_of(served | {"not in the layout": torch.zeros(1)}, LAYOUT) == published.digest
    served["v_proj.weight"][-1, -1] += 1
    assert digest_of(served, LAYOUT) != published.digest


def test_a_digest_does_not_depend_on_whether_a_tensor_fills_whole_chunks() -> None:
    plain = {"a": torch.randn(100_000), "b": torch.randn(7)}
    layout = Layout.of(plain, chunk_bytes=64 << 10)
    strided = {"a": torch.stack([plain["a"], plain["a"]], 1)[:, 0], "b": plain["b"]}
    assert digest_of(plain, layout) == digest_of(strided, layout)


def test_a_staged_version_is_not_seen_before_the_relay_proved_it(owner: SegmentOwner) -> None:
    reader = WeightReader(owner.root)
    assert reader.newest() is None
    Publisher(owner.root).publish(0, tensors())
    assert (reader.newest(), reader.held(), owner.head()) == (None, [], None)
    with pytest.raises(LookupError, match="no version held"), reader.pull():
        pass
    owner.promote(0)
    assert (reader.newest(), reader.held(), owner.head()) == (0, [0], 0)


def test_three_slots_hold_three_versions_and_an_older_one_is_named_as_gone(owner: SegmentOwner) -> None:
    publish(owner, 1, 2, 4, 7)
    reader = WeightReader(owner.root)
    assert reader.held() == owner.held() == [2, 4, 7]
    with reader.pull(4) as pulled:
        assert (pulled.version, pulled.tensors["scalar"].item()) == (4, 4.0)
    with pytest.raises(LookupError, match=r"version 1 not held under .*; held: \[2, 4, 7\]"), reader.pull(1):
        pass


def test_versions_only_grow(owner: SegmentOwner) -> None:
    publish(owner, 5)
    publisher = Publisher(owner.root)
    for version in (4, 5):
        with pytest.raises(ValueError, match=f"version {version} is not newer than 5"):
            publisher.publish(version, tensors())
    with pytest.raises(ValueError, match="version 4 is not newer than 5"):
        owner.promote(4)


def test_announcing_twice_gives_the_same_answer(owner: SegmentOwner) -> None:
    digest = Publisher(owner.root).publish(2, tensors()).digest
    assert owner.promote(2).digest == owner.promote(2).digest == digest


def test_a_version_that_was_never_staged_is_named(owner: SegmentOwner) -> None:
    Publisher(owner.root).publish(2, tensors())
    with pytest.raises(LookupError, match=r"version 3 is not staged under .*; there are \[2\]"):
        owner.promote(3)


def test_a_staged_version_waits_for_the_relay_while_the_trainer_publishes_the_next(owner: SegmentOwner) -> None:
    publish(owner, 1, 2, 3)
    publisher = Publisher(owner.root)
    publisher.publish(4, tensors(4))
    publisher.publish(5, tensors(5))
    assert [owner.promote(4).version, owner.promote(5).version] == [4, 5]


def test_a_damaged_version_never_becomes_readable_and_can_be_published_again(owner: SegmentOwner) -> None:
    publish(owner, 1)
    publisher = Publisher(owner.root)
    publisher.publish(2, tensors(2))
    flip_a_byte_of(owner.root, 2)
    with pytest.raises(LaminarError, match=r"version 2 in .*slot\d is damaged: bytes \d+ to \d+"):
        owner.promote(2)
    assert WeightReader(owner.root).held() == [1]
    publisher.publish(2, tensors(2))
    owner.promote(2)
    assert WeightReader(owner.root).held() == [1, 2]


def test_damage_after_publishing_is_found_by_a_verifying_pull_only(owner: SegmentOwner) -> None:
    publish(owner, 1)
    flip_a_byte_of(owner.root, 1)
    reader = WeightReader(owner.root)
    with pytest.raises(LaminarError, match=r"version 1 .* do not match their checksum"), reader.pull():
        pass
    with reader.pull(verify=False) as pulled:
        assert digest_of(pulled.tensors, LAYOUT) != pulled.digest


def test_a_pinned_version_stays_and_an_unpinned_one_is_recycled(owner: SegmentOwner) -> None:
    publish(owner, 1, 2)
    reader = WeightReader(owner.root)
    with reader.pull(2) as pulled:
        let_go = pulled.tensors["scalar"]
        assert let_go.item() == 2.0
    with reader.pull(1) as pinned:
        publish(owner, 3, 4, 5, 6)
        assert pinned.tensors["scalar"].item() == 1.0
        assert let_go.item() != 2.0  # why the pin is needed
        assert reader.held() == [1, 5, 6]


def test_tensors_are_taken_away_with_the_pin(owner: SegmentOwner) -> None:
    publish(owner, 1)
    with WeightReader(owner.root).pull() as pulled:
        assert pulled.tensors
    assert not pulled.tensors


def test_a_trainer_that_finds_every_slot_pinned_says_who_pins_what(owner: SegmentOwner) -> None:
    publish(owner, 1, 2, 3)
    reader = WeightReader(owner.root)
    with reader.pull(1), reader.pull(2):
        message = rf"no slot free for version 4 in 0.05 s.*\(version 1\) is pinned by process {os.getpid()}"
        with pytest.raises(TimeoutError, match=message):
            Publisher(owner.root, deadline=0.05).publish(4, tensors())
    Publisher(owner.root, deadline=0.05).publish(4, tensors())


def test_tensors_of_another_model_are_refused(owner: SegmentOwner) -> None:
    with pytest.raises(LaminarError, match=r"tensor half is float32 \(600,\), the layout says bfloat16"):
        Publisher(owner.root).publish(1, tensors() | {"half": torch.zeros(600)})


def test_preparing_again_changes_nothing_and_another_layout_needs_a_reset(owner: SegmentOwner) -> None:
    publish(owner, 1)
    owner.prepare(Layout.from_json(LAYOUT.to_json()))
    assert owner.held() == [1]
    other = {"a": torch.ones(10)}
    with pytest.raises(LaminarError, match=f"holds layout {LAYOUT.hash}, asked for"):
        owner.prepare(Layout.of(other))
    publisher, reader = Publisher(owner.root), WeightReader(owner.root)
    publisher.publish(2, tensors())
    assert reader.held() == [1]
    owner.prepare(Layout.of(other), reset=True)
    assert reader.held() == []
    publisher.publish(1, other)
    owner.promote(1)
    with reader.pull() as pulled:
        assert torch.equal(pulled.tensors["a"], other["a"])


def test_too_little_shared_memory_is_said_in_bytes_and_leaves_nothing(root: Path) -> None:
    owner = SegmentOwner(root)
    huge = Layout.pack([TensorSpec("a", "int8", (1 << 50,), 1 << 50)], chunk_bytes=1 << 40)
    with pytest.raises(LaminarError, match=r"3 slots of the weights need 3,377,699,\S+ bytes, \S+ are free"):
        owner.prepare(huge)
    assert sorted(path.name for path in root.iterdir()) == ["owner.lock", "users.lock"]
    owner.prepare(LAYOUT)
    owner.close()
    assert not root.exists()


def test_without_a_relay_a_trainer_is_told_so_and_a_replica_just_has_nothing(root: Path) -> None:
    with pytest.raises(LaminarError, match="holds no segment: its relay has not prepared one, or has ended"):
        Publisher(root).publish(1, tensors())
    assert WeightReader(root).newest() is None
    with pytest.raises(LookupError, match="nothing is published"), WeightReader(root).pull():
        pass


def test_closing_removes_every_file_but_what_is_mapped_stays_readable(owner: SegmentOwner) -> None:
    publish(owner, 1)
    publisher, reader = Publisher(owner.root), WeightReader(owner.root)
    publisher.publish(2, tensors(2))
    with reader.pull() as pulled:
        owner.close()
        owner.close()
        assert not owner.root.exists()
        assert pulled.tensors["scalar"].item() == 1.0
    assert reader.held() == []
    with pytest.raises(LaminarError, match="holds no segment"):
        publisher.publish(3, tensors(3))
    remove_segments(owner.root)


def test_readers_and_trainer_follow_a_relay_that_starts_anew(owner: SegmentOwner) -> None:
    publish(owner, 1)
    publisher, reader = Publisher(owner.root), WeightReader(owner.root)
    with reader.pull() as pulled:
        assert pulled.version == 1
    owner.close()
    again = SegmentOwner(owner.root)
    again.prepare(LAYOUT)
    publisher.publish(2, tensors(2))
    again.promote(2)
    with reader.pull() as pulled:
        assert (pulled.version, pulled.tensors["scalar"].item()) == (2, 2.0)
    again.close()


def test_a_truncated_slot_is_named(owner: SegmentOwner) -> None:
    publish(owner, 1)
    os.truncate(owner.root / "slot1", 5000)
    with pytest.raises(LaminarError, match=r"slot1 has 5000 bytes, expected \d+: truncated"):
        WeightReader(owner.root).newest()


def test_writing_to_a_pulled_tensor_ends_the_writer_and_changes_nothing(owner: SegmentOwner, start) -> None:
    publish(owner, 1)

    def write() -> None:
        faulthandler.disable()  # its report would look as if the tests had crashed
        with WeightReader(owner.root).pull() as pulled:
            pulled.tensors["scalar"].fill_(9.0)

    writer = start(write)
    writer.join(20)
    assert writer.exitcode == -signal.SIGSEGV
    with WeightReader(owner.root).pull() as pulled:
        assert pulled.tensors["scalar"].item() == 1.0
