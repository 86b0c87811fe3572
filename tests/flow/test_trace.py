"""Tracing: calls inside a flow become nodes; the graph is known before anything runs."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from typing import Any

import dask
import pytest
from hypothesis import given
from hypothesis import strategies as st

import laminar as lm
from laminar.errors import UserError
from laminar.flow.graph import Graph, layers_of
from laminar.flow.holes import fill, take_out
from laminar.flow.trace import NodeInfo, Pending, stage


@dataclass(frozen=True)
class Spec:
    data: Any = None
    replicas: int = 1

    def check(self) -> None:
        if self.replicas < 0:
            raise UserError(f"replicas={self.replicas}; expected 0 or more")

    def derived(self) -> dict[str, object]:
        return {"twice": 2 * self.replicas}

    def needs(self) -> dict[str, Any]:
        return {"replicas": self.replicas, "trainer": self.replicas > 2}


async def work(spec, context, **inputs):
    return inputs


@lm.task
def numbers(size: int, step: int = 1) -> list[int]:
    return list(range(0, size, step))


@lm.task
def total(values: Any) -> int:
    return sum(values)


def test_a_task_called_outside_a_flow_just_runs():
    assert total(numbers(4)) == 6


def test_a_stage_called_outside_a_flow_is_refused():
    with pytest.raises(UserError, match=r"post_train is called inside an @lm.flow function"):
        stage("post_train", work, Spec(), {})


def test_nodes_come_in_the_order_of_the_calls_with_what_they_depend_on():
    @lm.flow
    def demo(size: int = 3):
        values = numbers(size)
        a = stage("work", work, Spec(values), {"data": values})
        return {"b": stage("work", work, Spec(), {"data": [a.best, {"x": total(values)}]})}

    found = [(node.name, node.kind, node.depends_on) for node in demo.graph().nodes]
    assert found == [
        ("numbers", "task", ()),
        ("work", "stage", ("numbers",)),
        ("total", "task", ("numbers",)),
        ("work-2", "stage", ("work", "total")),
    ]
    keys = [node.key for node in demo.graph().nodes]
    assert len(set(keys)) == 4 and keys[0].startswith("numbers-") and keys[3].startswith("work-2-")


def test_the_same_call_again_is_the_same_node():
    @lm.flow
    def demo():
        return numbers(3), numbers(size=3), numbers(3, step=1), numbers(4)

    assert [node.name for node in demo.graph().nodes] == ["numbers", "numbers-2"]


def test_a_result_that_is_used_twice_travels_once():
    one, other = dask.delayed(1), dask.delayed(2)
    taken: list[Any] = []
    template = take_out({"a": [one, other], "b": (one,)}, taken)
    assert [delayed.key for delayed in taken] == [one.key, other.key]
    assert fill(template, ["x", "y"]) == {"a": ["x", "y"], "b": ("x",)}


def test_a_stage_knows_in_its_settings_what_is_not_known_yet():
    @lm.flow
    def demo():
        values = numbers(3)
        return stage("work", work, Spec(values), {"data": values})

    assert demo.check().trace.nodes[1].spec == Spec(Pending("numbers"))


def test_needs_are_the_largest_of_each_and_checks_are_made():
    @lm.flow
    def demo(first: int = 3, second: int = 1):
        return [stage("work", work, Spec(None, n), {}) for n in (first, second)]

    assert demo.check().needs() == {"replicas": 3, "trainer": True}
    assert demo.check(first=1, second=3).needs() == {"replicas": 3, "trainer": True}
    assert demo.check().derived() == {"work": {"twice": 6}, "work-2": {"twice": 2}}
    with pytest.raises(UserError, match="replicas=-1"):
        demo.check(second=-1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda: numbers(), "task `numbers`: missing a required argument: 'size'"),
        (lambda: numbers(3, stop=4), "task `numbers`: got an unexpected keyword argument 'stop'"),
        (lambda: 1 if numbers(3) else 2, r"raised TypeError at test_trace.py:\d+: .*not known yet"),
        (lambda: {}["x"], r"flow `<lambda>` raised KeyError at test_trace.py:\d+: 'x'"),
        (lambda: sys.exit(3), r"flow `<lambda>` raised SystemExit at test_trace.py:\d+: 3"),
    ],
)
def test_what_goes_wrong_while_a_flow_is_traced_is_one_line(body, message):
    with pytest.raises(UserError, match=message):
        lm.flow(body).graph()


def test_a_flow_is_not_called():
    with pytest.raises(UserError, match=r"use `demo.run\(…\)`"):

        @lm.flow
        def demo():
            pass

        demo()


def test_a_task_that_would_return_before_it_has_run_is_refused():
    def some():
        yield 1

    with pytest.raises(UserError, match="task `work` is an async function"):
        lm.task(work)
    with pytest.raises(UserError, match="task `some` is a generator function; have it return its result"):
        lm.task(some)


def test_the_text_spells_a_shared_branch_out_once():
    nodes = [
        NodeInfo("a", "", "task"),
        NodeInfo("b", "", "task", depends_on=("a",)),
        NodeInfo("c", "", "stage", depends_on=("b",)),
        NodeInfo("d", "", "stage", depends_on=("b",)),
    ]
    assert str(Graph("f", nodes)).splitlines() == [
        "f",
        "├── c (stage)",
        "│   └── b (task)",
        "│       └── a (task)",
        "└── d (stage)",
        "    └── b (task), as above",
    ]


@st.composite
def graphs(draw):
    count = draw(st.integers(0, 8))
    return [
        NodeInfo(
            f"<n{i}>",
            f"k{i}",
            draw(st.sampled_from(["task", "stage"])),
            depends_on=tuple(f"<n{j}>" for j in sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)))) if i else (),
        )
        for i in range(count)
    ]


@given(graphs())
def test_the_drawing_is_xml_with_a_box_a_node_and_an_arrow_a_dependency(nodes):
    root = ET.fromstring(Graph("f", nodes).svg())
    space = "{http://www.w3.org/2000/svg}"
    boxes = [(int(r.get("x")), int(r.get("y"))) for r in root.iter(f"{space}rect")]
    assert len(set(boxes)) == len(nodes)
    assert all(0 <= x <= int(root.get("width")) - 170 and y >= 0 for x, y in boxes)
    arrows = [p for p in root.iter(f"{space}path") if p.get("marker-end")]
    assert len(arrows) == sum(len(node.depends_on) for node in nodes)


@given(graphs())
def test_every_node_stands_below_what_it_depends_on(nodes):
    row = {name: i for i, layer in enumerate(layers_of(nodes)) for name in layer}
    assert all(row[node.name] > row[source] for node in nodes for source in node.depends_on)
