"""end_to_end on the tiny shape without a GPU: passes, figures, the JSON line and refusals."""

import itertools
import json
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mtp_research.bench import end_to_end
from mtp_research.decode.sampling.sampling_params import SamplingParams
from mtp_research.decode.stats import RequestRecord

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tries the commands on a CPU")
ROOT = Path(__file__).parents[2]
FEW = ["--cpu", "--shape", "tiny", "--batch", "2", "--requests", "3", "--prompt", "8"]


def test_passes_decode_every_token_and_the_last_line_is_json(tmp_path, capsys):
    path = tmp_path / "line.json"
    words = ["--output", "6", "--passes", "2", "--k", "0", "2", "--accept", "1.0", "--warm-up"]
    assert end_to_end.main([*FEW, *words, "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == path.read_text()
    rows = json.loads(lines[-1])["rows"]
    assert [(row["num_drafts"], row["pass"]) for row in rows] == [(0, 1), (0, 2), (2, 1), (2, 2)]
    assert all((row["num_requests"], row["num_tokens"]) == (3, 18) for row in rows)
    assert [row["tau"] for row in rows] == [1.0, 1.0, 3.0, 3.0]
    assert rows[2]["num_steps"] < rows[0]["num_steps"]
    assert len(lines) == len(rows) + 1
    assert rows[0]["build_s"] < rows[0]["ready_s"] < rows[2]["ready_s"]


def test_file_is_written_after_each_pass(tmp_path, monkeypatch):
    path, written, serve = tmp_path / "line.json", [], end_to_end.serve

    def noted(*args, **how):
        written.append(len(json.loads(path.read_text())["rows"]) if path.exists() else 0)
        return serve(*args, **how)

    monkeypatch.setattr(end_to_end, "serve", noted)
    words = ["--output", "2", "--passes", "2", "--k", "0", "1", "--json", str(path)]
    assert end_to_end.main([*FEW, *words]) == 0
    assert written == [0, 1, 2, 3]


def test_without_passes_it_compiles_alone(monkeypatch):
    warmed = []
    monkeypatch.setattr(end_to_end.SpecDecoder, "warm_up", lambda *_, **how: warmed.append(how))
    assert end_to_end.main([*FEW, "--warm-up", "--passes", "0", "--k", "0", "1"]) == 0
    assert warmed == [{"num_requests": 3}] * 2


def test_one_decoder_serves_other_lengths_and_arrivals_too(tmp_path, monkeypatch, capsys):
    built, decoder = [], end_to_end.SpecDecoder
    monkeypatch.setattr(
        end_to_end, "SpecDecoder", lambda *args, **how: built.append(how) or decoder(*args, **how)
    )
    file = tmp_path / "arrivals.txt"
    file.write_text("0 0 0.4")
    words = ["--output", "2", "--passes", "2", "--k", "1", "--also", "12:5", f"4:3:{file}"]
    assert end_to_end.main([*FEW, *words]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)["rows"]
    sizes = [(row["prompt"], row["output"], row["pass"]) for row in rows]
    assert sizes == [(*size, number) for size in ((8, 2), (12, 5), (4, 3)) for number in (1, 2)]
    assert [row["num_tokens"] for row in rows] == [6, 6, 15, 15, 9, 9]
    assert [row["arrivals"] for row in rows] == [*[None] * 4, str(file), str(file)]
    assert rows[-1]["wall_s"] > 0.4
    (how,) = built
    assert how["engine"].max_model_len == 12 + 5 + 64
    assert f"B=2 8192 rows 4->3, {file} pass 2," in lines[-1]


@pytest.mark.parametrize("word", ["12", "12:x", ":5", "12:5:{file}"])
def test_other_requests_that_cannot_be_read_are_refused_before_a_decoder(
    word, tmp_path, monkeypatch, capsys
):
    (tmp_path / "few").write_text("0 1")
    monkeypatch.setattr(end_to_end, "SpecDecoder", None)
    assert end_to_end.main([*FEW, "--also", word.format(file=tmp_path / "few")]) == 2
    assert "--also must hold" in (found := capsys.readouterr().err) or "2; write" in found


def test_rows_bound_a_step(capsys):
    words = [*FEW, "--output", "2", "--passes", "1", "--k", "0", "--rows", "8192", "4"]
    assert end_to_end.main(words) == 0
    wide, narrow = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (wide["max_rows"], narrow["max_rows"]) == (8192, 4)
    assert narrow["num_steps"] > wide["num_steps"] + 2


def test_prompts_wait_for_free_places(monkeypatch):
    settings = []
    decoder = end_to_end.SpecDecoder

    def noting(*args, engine, **options):
        settings.append((engine.admit_together, engine.max_num_requests))
        return decoder(*args, engine=engine, **options)

    monkeypatch.setattr(end_to_end, "SpecDecoder", noting)
    words = ["--output", "2", "--passes", "1", "--k", "0"]
    assert end_to_end.main([*FEW, *words]) == end_to_end.main([*FEW, *words, "--admit", "2"]) == 0
    assert settings == [(1, 2), (2, 2)]


def test_policies_share_the_pass_without_drafts(capsys):
    words = ["--output", "2", "--passes", "1", "--k", "0", "1", "--policy", "eagle", "training"]
    assert end_to_end.main([*FEW, *words]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["num_drafts"], row["policy"]) for row in rows] == [
        (0, "eagle"),
        (1, "eagle"),
        (1, "training"),
    ]


def test_figures_are_percentiles_over_requests_and_tokens_over_the_wall():
    records = [
        RequestRecord(str(n), 4, (1,) * 5, "length", (1, 2), (3, 3), 4, ttft_s=n, decode_s=4 * n)
        for n in (1.0, 2.0, 3.0)
    ]
    found = end_to_end._figures(records, wall_s=5.0)
    assert (found["num_tokens"], found["tok_per_s"], found["tau"]) == (15, 3.0, 2.5)
    assert found["ttft_ms"]["p50"] == found["token_ms"]["p50"] == 2000
    assert found["ttft_ms"]["p99"] == pytest.approx(2980)


def test_requests_are_seen_when_they_have_come(tmp_path, capsys):
    (tmp_path / "trace").write_text("0.0\n0.0\n0.4\n")
    words = ["--output", "2", "--passes", "1", "--k", "0", "--arrivals", str(tmp_path / "trace")]
    assert end_to_end.main([*FEW, *words]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["wall_s"] > 0.4
    assert row["num_requests"] == 3


def test_a_request_that_comes_during_a_step_has_waited_for_its_end(monkeypatch):
    now = [5.0]

    def sleep(seconds):
        now[0] += seconds + 1e-9  # never less than what was asked for

    clock = SimpleNamespace(perf_counter=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(end_to_end, "time", clock)

    class Slow:
        """A decoder whose step takes a tenth of a second and ends every request."""

        def __init__(self):
            self.stats = type("Stats", (), {"records": []})()
            self.live, self.seeds = [], []

        has_work = property(lambda self: bool(self.live))

        def add_request(self, prompt, *, sampling, request_id):
            self.live.append(request_id)
            self.seeds.append(sampling.seed)

        def step(self):
            sleep(0.1)
            self.stats.records += [
                RequestRecord(name, 1, (1,), "length", (), (), 1, ttft_s=0.1, decode_s=0.0)
                for name in self.live
            ]
            self.live = []

    decoder = Slow()
    records = end_to_end.serve(decoder, [[1]] * 3, [0.0, 0.02, 0.3], sampling=SamplingParams())
    assert [one.request_id for one in records] == ["0", "1", "2"]
    assert decoder.seeds == [0, 1, 2]
    first, during, alone = (one.ttft_s for one in records)
    assert (first, during, alone) == pytest.approx((0.1, 0.18, 0.1))


def test_arrivals_at_a_rate_are_those_of_a_poisson_process():
    options = end_to_end.parse_options(["--rate", "50", "--requests", "4000"])
    seconds = end_to_end._arrivals(options, None, seed=1)
    gaps = [b - a for a, b in itertools.pairwise([0.0, *seconds])]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(mean, rel=0.06)  # exponential gaps
    assert seconds == end_to_end._arrivals(options, None, seed=1)
    assert seconds != end_to_end._arrivals(options, None, seed=2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "0"], "--rate must be > 0"),
        (["--heads", "x"], "--target and --heads must be given together"),
        (["--target", "x", "--heads", "y", "--accept", ".5"], "--accept must be left out"),
    ],
)
def test_options_that_do_not_fit_are_refused(words, message, capsys):
    assert end_to_end.main([*FEW, *words]) == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_the_command_exits_4(capsys):
    assert end_to_end.main([]) == 4
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_table_of_starts_is_what_is_stored() -> None:
    stored = json.loads((ROOT / "docs" / "results" / "cold_start.json").read_text())
    new, old = stored["newest"], stored["with_bytecode"]
    page = (ROOT / "docs" / "benchmarks.md").read_text()

    def ready(rows: list[dict]) -> str:
        assert all(row["num_builds"] == 0 for row in rows), "the page says that nothing came later"
        return " / ".join(f"{row['ready_s']:.1f}" for row in rows)

    for first, last in ((0, 1), (1, 3), (3, 5)):
        parts = [(one, name) for one in (new, old) for name in ("cold", "warm")]
        cells = [ready(one[name][first:last]) for one, name in parts]
        assert f"| {' | '.join(cells)} |" in page
    shared = stored["any_k"]
    seconds = [", ".join(ready([row]) for row in shared[name]) for name in ("cold", "warm")]
    cold, warm = (" and ".join(one.rsplit(", ", 1)) for one in seconds)
    assert f"after {cold} s, warm {warm} ([stored]" in page
    shares = [share for one in (shared, new) for share in _shares_of_k_5(one["cold"])]
    words = "took {:.2f} and {:.2f} of the first condition, before {:.2f} and {:.2f} (["
    assert words.format(*shares).replace("0.", ".") in page
    names = ("mimo", "mimo_again", "mimo_warm")
    words = ["{}, again {} | {}".format(*(ready(one[n]) for n in names)) for one in (new, old)]
    assert f"| {' | '.join(words)} |" in page
    slow, fast = ready(old["without_bytecode"]), ready(old["cold"][:1])
    assert f"K = 0 took {slow} instead of {fast} s" in page
    other = old["another_machine"]
    small = map(ready, (other["cold"][:1], other["cold"][-1:], other["warm"][:1]))
    seven = f"{ready(other['mimo'])} and {ready(other['mimo_again'])} for MiMo-7B"
    assert "{}, {} and {} s for the 135M shape and {}".format(*small, seven) in page
    ahead = stored["compiled_ahead"]
    once, before, again = (ready(ahead["mimo"][name]) for name in ("new", "before", "new_again"))
    assert f"MiMo-7B {once} s, the machine's first start of that shape; {before} s before" in page
    assert f"{again} s again with it" in page
    small = ahead["m135"]
    now = [" / ".join(map(str, seconds)) for seconds in small["new_ready_s"]]
    assert f"{now[0]} and {now[1]} s, before {' and '.join(map(ready, small['before']))}" in page
    assert f"before the change it took {ready(small['before_first'])} s there" in page
    seconds = [part["ready_s"] for part in new["cold"]]  # the aims that the page calls reached
    assert seconds[0] <= 45
    assert seconds[-1] <= 120
    assert new["warm"][0]["ready_s"] <= 20
    assert new["mimo"][0]["ready_s"] <= 60


def _shares_of_k_5(rows: list[dict]) -> list[float]:
    """What K = 5 took behind K = 3, `eagle` and then `training`, in units of K = 0."""
    ready = [row["ready_s"] for row in rows]
    return [(ready[i] - ready[i - 1]) / ready[0] for i in (3, 4)]


def test_table_of_requests_in_fp8_is_what_is_stored() -> None:
    stored = json.loads((ROOT / "docs" / "results" / "fp8.json").read_text())["end_to_end"]
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert stored["command"] in page
    rows = stored["rows"]

    def cells(first: dict, second: dict) -> str:
        assert first["num_builds"] == second["num_builds"] == 0
        step_ms = 1e3 * second["wall_s"] / second["num_steps"]
        return f"{first['tok_per_s']:.0f}, {second['tok_per_s']:.0f} | {step_ms:.0f}"

    for first, second in zip(rows[::2], rows[1::2], strict=True):
        before = cells(*stored["before"]["rows"]) if first["max_rows"] == 512 else "|"
        assert f"| {first['max_rows']:,} | {cells(first, second)} | {before} |" in page
    assert f"ready after {rows[0]['ready_s']:.0f} s" in page
