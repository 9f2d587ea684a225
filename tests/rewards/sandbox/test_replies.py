"""Test that reading any reply, even a hostile one, is cheap and ends in a verdict, never in an
exception that stops a run.
"""

import json
import sys
import time
import tracemalloc
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparrow.rewards import CodeVerifier, Limits
from sparrow.rewards.sandbox import Child, ChildEndedError, judge, pack, unpack
from sparrow.rewards.sandbox.inside.wire import parse

PRIME = 2**61 - 1  # integers that differ by this number have the same hash


class Said(Child):
    """A stand-in for a child process that has already replied."""

    def __init__(self, said: bytes) -> None:
        self._unread = bytearray(said)
        self.process = SimpleNamespace(pid=0)
        self.status = None

    def send_within(self, message, time_limit):
        json.dumps(message)

    def _within(self, time_limit, attempt):
        return attempt(0.0)  # no process is running, so there is no time to measure

    def _read(self, deadline):
        raise ChildEndedError("nothing more")


def verdict(said: bytes, expected: object = 42) -> tuple[str, str]:
    """Return the verdict on a called function whose process sends this reply."""
    run = judge._Run("", "", Limits(), "bwrap")
    try:
        return run._call(Said(said), "f", [1], judge._Readings({"outputs": [expected]}))
    except ChildEndedError as error:
        return judge._broken(error, SimpleNamespace(stopped_by_limit=False))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.just(10**400)
    | st.just(PRIME),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "dict",
                    "tuple",
                    "set",
                    "frozenset",
                    "bytes",
                    "complex",
                    "value",
                    "raised",
                    "eval",
                    "",
                ]
            ),
            inner,
            max_size=2,
        )
    ),
    max_leaves=12,
)
REPLIES = st.dictionaries(
    st.sampled_from(["value", "raised", "verdict", "call", "changed", "x"]), VALUES, max_size=3
)
EXPECTED = [42, 0.5, "x", [1, 2], {"a": [1]}, None]


@settings(max_examples=1000, deadline=None)
@given(REPLIES, st.sampled_from(EXPECTED))
@example({"value": {"complex": [10**400, 0]}}, 42)
@example({"value": {"bytes": 7}}, 42)
@example({"value": {"set": [[1]]}}, 42)
@example({"raised": [1]}, 42)
def test_any_json_object_results_in_a_verdict(reply, expected):
    found, detail = verdict(json.dumps(reply).encode() + b"\n", expected)
    assert (
        found in ("pass", "wrong", "error", "memory")
        and isinstance(detail, str)
        and len(detail) < 1000
    )
    if found == "pass":  # only a correct value may pass
        value = unpack(reply["value"])
        assert judge.same_value(value, expected) and detail == ""


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200) | st.text('[]{}",:0\\eE-. \n', max_size=200).map(str.encode))
@example(b"\xff\xfe\n")
@example(b'{"value": "\\ud800"}\n')
@example(b'{"value": 1e999}\n')
@example(b'"' + b'\\"' * 50)
def test_any_line_of_bytes_results_in_a_verdict(line):
    found, detail = verdict(line)
    assert found in ("pass", "wrong", "error") and len(detail) < 1000


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=60), st.integers(1, 7), st.integers(1, 30))
def test_a_reply_may_arrive_in_pieces_of_any_size(body, size, most):
    """Check that a reply read piece by piece equals the same reply read at once, and never exceeds
    its limit.
    """

    class Pieces(Said):
        def _read(self, deadline):
            if not self.rest:
                raise ChildEndedError("nothing more")
            self._unread += self.rest[:size]
            self.rest = self.rest[size:]

    line = json.dumps({"value": body.decode("latin-1")}).encode()
    pieces = Pieces(b"")
    pieces.rest = line + b"\n" + body
    if len(line) > most + 20:
        with pytest.raises(ChildEndedError, match=f"over the limit of {most} bytes"):
            pieces.receive(0.0, most)
    else:
        assert pieces.receive(0.0, len(line)) == json.loads(line)
        assert pieces.receive_bytes(len(body), 0.0) == body


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"value": [' + b"0," * (1 << 20) + b"0]}",
            r"it has 1048578 values, over the limit of 1048576",
        ),
        (
            b'{"value": [' + b"[]," * (1 << 18) + b"[]]}",
            r"it has 262147 containers, over the limit of 262144",
        ),
        (
            b'{"value": [' + b'"",' * (1 << 18) + b'""]}',
            r"it has 262146 strings, over the limit of 262144",
        ),
        (b'{"value": ' + b"[" * 200 + b"]" * 200 + b"}", "nested 201 deep, over the limit of 200"),
        (b'{"value": ' + b"9" * 4301 + b"}", "Exceeds the limit|a number has 4301 digits"),
        (b'{"value": 1', "not JSON"),
        (b"[1]", "not an object"),
    ],
    ids=["values", "containers", "strings", "depth", "digits", "no JSON", "no object"],
)
def test_oversized_or_malformed_replies_raise_errors(line, message):
    with pytest.raises(ValueError, match=message):
        parse(line)


def test_replies_within_the_limits_are_accepted():
    for value in (
        [0] * ((1 << 20) - 2),
        [[]] * ((1 << 18) - 2),
        "[{" * 1_000_000,
        10**4299,
        ['["\\'] * 1000,
    ):
        assert parse(json.dumps({"value": value}).encode()) == {"value": value}
    deep = 1
    for _ in range(199):
        deep = [deep]
    assert parse(json.dumps({"value": deep}).encode()) == {"value": deep}


def test_the_number_of_digits_is_limited_even_if_python_sets_no_limit(monkeypatch):
    monkeypatch.setattr(sys, "get_int_max_str_digits", lambda: 0)
    with pytest.raises(ValueError, match="a number has 5000 digits"):
        parse(b'{"value": ' + b"7" * 5000 + b"}")
    assert parse(b'{"value": 77}') == {"value": 77}


@pytest.mark.parametrize("kind", ["set", "frozenset", "dict"])
@pytest.mark.parametrize("inside", ["int", "tuple"])
def test_more_than_32_keys_with_the_same_hash_raise_an_error(kind, inside):
    keys = [i * PRIME for i in range(1, 34)]
    if inside == "tuple":
        keys = [{"tuple": [key]} for key in keys]
    content = [[key, 0] for key in keys] if kind == "dict" else keys
    with pytest.raises(ValueError, match="more than 32 keys have the same hash"):
        unpack({kind: content})
    assert len(unpack({kind: content[:16]})) == 16


def test_instances_of_a_complex_subclass_arrive_as_plain_complex_numbers():
    class Sly(complex):
        real = 10**400

    assert unpack(pack(Sly(1, 2))) == 1 + 2j


HOSTILE = {
    "empty lists": b'{"value": [' + b"[]," * 2_700_000 + b"[]]}",
    "empty objects": b'{"value": [' + b"{}," * 2_700_000 + b"{}]}",
    "objects of one key": b'{"value": [' + b'{"a":0},' * 1_000_000 + b"0]}",
    "keys": b'{"value": 1, ' + b",".join(b'"%d":0' % i for i in range(700_000)) + b"}",
    "short strings": b'{"value": [' + b'"" ,' * 1_900_000 + b"0]}",
    "quotes that never close": b'{"value": "' + b'\\"' * 4_000_000,
    "quotes and brackets that never close": b'{"value": [[[[' + b'"\\"[' * 250_000 + b"[" * 1000,
    "brackets that never close": b'{"value": ' + b"[" * 8_000_000,
    "commas": b'{"value": [' + b"," * 8_000_000,
    "digits": b'{"value": ' + b"9" * 8_000_000 + b"}",
    "escapes": b'{"value": "' + b"\\u0041" * 1_300_000 + b'"}',
    "colliding integers": b'{"value": {"set": ['
    + b",".join(b"%d" % (i * PRIME) for i in range(250_000))
    + b"]}}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_parsing_eight_megabytes_of_hostile_input_takes_little_time_and_memory(name):
    line = HOSTILE[name] + b"\n"
    assert len(line) < 8 << 20
    tracemalloc.start()
    began = time.process_time()
    try:
        found, _ = verdict(line)
        seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found in ("wrong", "error")
    assert seconds < 10 and peak < 96 << 20, (
        seconds,
        peak >> 20,
    )  # memory tracing makes parsing several times slower


def test_comparing_long_outputs_uses_little_memory():
    for output in ("\n" * 8_000_000 + "x", "x " * 4_000_000, "x\n" * 4_000_000):
        tracemalloc.start()
        try:
            assert not judge.same_output(output, "x y")
            assert not judge.same_output(output, "x\n" * 1000 + "y")
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 16 << 20
    assert judge.same_output("a  b \r\n\nc\n\n", "a b\n\nc")
    assert not judge.same_output("a b\nc", "a\nb c") and not judge.same_output("a\nb", "a b")


@pytest.mark.parametrize(
    "raised",
    ["StopIteration", "StopAsyncIteration", "GeneratorExit", "type('S', (StopIteration,), {})"],
)
def test_program_exceptions_do_not_end_the_tests_loop_early(raised, bwrap):
    tests = {"test": "assert all(map(lambda case: f(case[0]) == case[1], [(21, 42), (4, 8)]))"}
    judged = CodeVerifier().judge(f"def f(x): raise {raised}", tests)
    assert judged.verdicts == ("error",) and judged.detail in (raised, "S")
