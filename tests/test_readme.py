"""Every number of README.md is computed again from stored rounds and shipped files.

A *claim* is a pattern with groups and the texts that the groups must have. What is no measurement
is listed with its reason. A number in neither place fails, so that none goes stale unseen.
"""

import json
import re
import statistics
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from mtp_research.app.cli import compose_config
from mtp_research.config.schema import TrainConfig
from mtp_research.evaluation.report.grids import report_grids
from mtp_research.evaluation.report.stored import Report, recompute
from mtp_research.evaluation.report.terminal import render_short
from mtp_research.evaluation.stats import bootstrap, matrix_seeds
from mtp_research.evaluation.stats.fault_study import read_study
from mtp_research.evaluation.stats.matrix_seeds import GroupFigures, SeedMatrix, group_figures
from mtp_research.evaluation.stats.outcome import ConditionResult
from mtp_research.evaluation.stats.statistics import acceptance_ratios
from mtp_research.evaluation.stats.summary import ConditionSummary
from mtp_research.models.families import FAMILIES
from mtp_research.studies.study_tables import policy_losses
from mtp_research.training import step_costs
from tests.test_smollm2 import END_TO_END, SETS, length, speeds_by_batch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
TEXT = (ROOT / "README.md").read_text(encoding="utf8")
# A number is no part of a name such as chain_n3, H200 or p_1.
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")
INTERVAL = r"(\d\.\d{3}) \[(\d\.\d{3}), (\d\.\d{3})\]"
TARGETS = ("lab_base", "lab_small")

# Numbers that measure nothing: pattern, reason.
SETTINGS = {
    r"K = (0) is plain decoding": "meaning of a setting",
    r"\(K=(\d)\)": "settings named by the table's header",
    r"spec\.k=(3)": "a setting of the shown command",
    r"num_speculative_tokens=(3)": "a setting of the example",
    r"max_new_tokens=(64)": "a setting of the example",
    r"--max-new-tokens (256)": "a setting of the example",
    r"rounds with r >= (2)": "name of a row",
    r"module (2)|module (1)": "names of modules in the picture's text",
    r"SmolLM(2-135)M": "name of a model",
    r"Apache-(2\.0)": "name of the licence",
    r"engine of (22) November": "a date",
}


@cache
def matrix(target: str) -> SeedMatrix:
    return matrix_seeds.read_matrix(RESULTS / target)


@cache
def groups(target: str) -> list[GroupFigures]:
    return group_figures(matrix(target))


@cache
def shipped() -> Report:
    return recompute(RESULTS / "lab_deep" / "results.json.xz")


def texts_of(one: bootstrap.Estimate) -> tuple[str, ...]:
    return tuple(f"{value:.3f}" for value in (one.value, one.low, one.high))


def matrix_rows() -> Iterator[tuple[str, tuple[str, ...]]]:
    found = {(g.key.unroll, g.key.num_mtp_modules, g.key.policy): g for g in groups("lab_base")}
    for unroll, count in [("chain", 3), ("shared_context", 3), ("chain", 1), ("ttt", 1)]:
        both = [found[unroll, count, policy] for policy in ("training", "eagle")]
        cells = [rf"{'[*]{2}' * g.is_match}(\d\.\d+){'[*]{2}' * g.is_match}" for g in both]
        cells = [rf"{cell} \[(\d\.\d+), (\d\.\d+)\]" for cell in cells]
        name = rf"\| `{unroll}`, ({count}) modules? \| "
        texts = [str(count), *texts_of(both[0].length), *texts_of(both[1].length)]
        yield name + r" \| ".join(cells) + r" \|", tuple(texts)


def wrong_policy() -> Iterator[tuple[str, tuple[str, ...]]]:
    """The range of what the other policy costs, in whole percent, at K = 3 and at K = 5."""
    in_matrix = []
    for target in TARGETS:
        own = {g.key.head: g.length.value or 0.0 for g in groups(target) if g.is_match}
        lost = [(g.key.head, g.minus_match) for g in groups(target)]
        in_matrix += [
            -100 * (one.value or 0.0) / own[head] for head, one in lost if one is not None
        ]
    studies = [read_study(RESULTS / f"{target}_prices") for target in TARGETS]
    losses = [policy_losses(study).items() for study in studies]
    by_drafts = [
        [-(one.percent.value or 0.0) for each in losses for (_, k), one in each if k == num_drafts]
        for num_drafts in (3, 5)
    ]
    first, three, five = (
        (f"{min(found):.0f}", f"{max(found):.0f}") for found in (in_matrix, *by_drafts)
    )
    yield r"47 M the other one loses (\d) to (\d) % at K = 3\.", first
    yield (
        r"it loses (\d) to (\d+) % at K = 3\nand (\d) to (\d+) % at K = 5; the heads",
        three + five,
    )
    assert {len(study.prompts) for study in studies} == {120}
    yield r"On (\d+) other prompts, with one head", ("120",)
    counts = {cell.num_speculative_tokens for t in TARGETS for cell in matrix(t).cells}
    assert counts == {3}
    yield r"loses \d to \d % at K = (3)\.", ("3",)
    yield r"% at K = (3)\nand \d to \d+ % at K = (5)", ("3", "5")
    yield r"difference was found at K = (3)", ("3",)
    for target in TARGETS:  # "no difference": the interval of every pair holds 0
        for pair in matrix_seeds.match_pairs(matrix(target)):
            assert (pair.difference.low or 0.0) < 0 < (pair.difference.high or 0.0)


def printed() -> str:
    """What `eval.py` prints of the stored run."""
    return render_short(shipped()).strip("\n")


def quickstart() -> Iterator[tuple[str, tuple[str, ...]]]:
    (grid, *_) = report_grids(shipped())
    rows = {row[0]: row[1:] for row in grid.rows}
    for line in printed().splitlines():
        if (label := line[:27].rstrip()) in rows:
            yield re.escape(label) + r" +" + r" {2,}".join(["(.+?)"] * 3) + r"\n", rows[label]
    length = shipped().summaries[2].acceptance.acceptance_length_micro
    difference = shipped().paired[0].differences["acceptance_length_micro"]
    more = tuple(f"{value:+.3f}" for value in difference)
    signed = r"([+-]\d\.\d{3}) \[([+-]\d\.\d{3}), ([+-]\d\.\d{3})\]"
    yield (
        rf"training: {INTERVAL} tokens a round, {signed} over eagle at K = (3); texts",
        (*texts_of(length), *more, "3"),
    )
    num_prompts = str(len(shipped().prompts))
    yield r"texts identical (\d+)/(\d+)\n\nAcceptance and", (num_prompts, num_prompts)
    yield r"Acceptance and speed, (\d+) prompts, float32", (num_prompts,)
    config = shipped().config
    assert config["spec"]["num_speculative_tokens"] == 3
    new_tokens = str(config["sampling"]["max_new_tokens"])
    requests = str(config["engine"]["max_num_requests"])
    run = r"\((\d+) CPU cores, float32, (\d+) new tokens, greedy, batch (\d+), one pass; "
    yield run, (str(shipped().run["hardware"]["num_cores"]), new_tokens, requests)
    yield r"the shipped heads, (\d+) prompts", (num_prompts,)
    of_library = [one for one in shipped().prompts if one.category == "code"]
    python = str(shipped().run["versions"]["python"])
    yield r"\. (\d+) of the prompts are code of .* \(here (\S+)\)", (str(len(of_library)), python)
    assert {one.speed.num_passes for one in shipped().summaries} == {1}
    own = [own.speed.ratio_end_to_end for _, _, own in measured_on_a_cpu().values()]
    ratios, batches = tuple(f"{ratio:.2f}" for ratio in own), tuple(map(str, measured_on_a_cpu()))
    yield r"lab_deep is (\S+) times .*, (\S+) and (\S+) times at batch \d and \d \(", ratios
    yield r"without at batch (\d) \(`training`\), .* times at batch (\d) and (\d) \(", batches


def measured_on_a_cpu() -> dict[int, tuple[ConditionSummary, ...]]:
    """K = 0, `eagle` and `training`, by batch size."""
    stored = recompute(RESULTS / "lab_deep" / "batches" / "results.json.xz")
    found = {one.result.label: one for one in stored.summaries}
    names = ("baseline", "eagle", "training")
    return {n: tuple(found[f"{name} R={n}"] for name in names) for n in (1, 2, 4)}


def on_one_h200(part: str = ".") -> dict[str, ConditionSummary]:
    """lab_base at batch 1 and 8, or what a folder beside them holds, by condition."""
    stored = recompute(RESULTS / "lab_base_batches" / part / "results.json.xz")
    batch = 8 if part == "." else int(part.split("_")[1])
    num_prompts = min(4 * batch, 347)
    assert (len(stored.prompts), stored.config["sampling"]["max_new_tokens"]) == (num_prompts, 128)
    return {one.result.label: one for one in stored.summaries}


def speeds() -> Iterator[tuple[str, tuple[str, ...]]]:
    found = [on_one_h200()[f"training K=3 R={n}"].speed.ratio_end_to_end for n in (1, 8)]
    ratios = tuple(f"{ratio:.2f}" for ratio in found)
    yield r"lab_base is (\d\.\d+) and (\d\.\d+) times as fast end to end", ratios
    words = r"with `training` and K = (3) at batch (1) and (8) \((32) prompts, (128) new tokens\)"
    yield words, ("3", "1", "8", "32", "128")
    larger = {size: on_one_h200(f"batch_{size}") for size in (32, 64, 128)}
    twos = [
        next(one for one in found.values() if one.result.num_speculative_tokens == 2)
        for found in larger.values()
    ]
    ratios = [f"{two.speed.ratio_end_to_end:.2f}" for two in twos]
    words = r"With K = (2) it is (\S+), (\S+) and (\S+) times as fast at batch (32), (64) and (128)"
    yield words, ("2", *ratios, "32", "64", "128")
    yield r"\((128), (256) and (347) prompts", ("128", "256", "347")
    spread = max(map(largest_spread, larger.values()))
    yield r"passes of one K differ by up to (\d+) %", (f"{100 * spread:.0f}",)


def largest_spread(found: dict[str, ConditionSummary]) -> float:
    """Between the slowest and the fastest pass of a condition, as a share of their median."""
    ends = [one.speed.end_to_end for one in found.values()]
    return max((one.high - one.low) / one.value for one in ends)


def sizes() -> Iterator[tuple[str, tuple[str, ...]]]:
    deep, tiny = (f"{num_stored(name) / 1e6:.1f}" for name in ("lab_deep", "lab_tiny"))
    yield r"shipped (\S+) M target", (deep,)
    yield r"`lab_deep` \((\S+) M parameters, (\d+) thin layers\)", (deep, num_layers("lab_deep"))
    yield r"`lab_tiny` \((\S+) M,", (tiny,)
    base, small = (parameters(name) for name in TARGETS)
    yield r"lab_base has (\d+) M parameters", (f"{base / 1e6:.0f}",)
    yield r"of which a token meets (\d+) M;", (f"{active_parameters('lab_base') / 1e6:.0f}",)
    yield r"a target of (\d+) M", (f"{small / 1e6:.0f}",)
    yield r"(\d+) model families", (str(len(FAMILIES)),)
    own = matrix("lab_base")
    yield r"trained in (\d) data orders", (str(len(own.done_seeds)),)
    yield r"\n(\d+) prompts, K = (\d), greedy", (str(len(own.prompts)), "3")
    yield r"\((\d+) % interval", (f"{100 * bootstrap.LEVEL:.0f}",)


def released() -> Iterator[tuple[str, tuple[str, ...]]]:
    stored = json.loads((RESULTS / "smollm2" / "same_text.json").read_text(encoding="utf8"))
    rows = stored["rows"]
    equal = sum(row["num_tokens"] == row["num_equal_tokens"] for row in rows)
    assert (stored["dtype"], equal) == ("torch.float32", stored["num_equal"])
    yield (
        r"on (\d+) of (\d+) first questions of MT-Bench, (\d+) tokens each, float32",
        (str(equal), str(len(rows)), str(stored["tokens"])),
    )
    yield r"greedy text at K = (0)", ("0",)
    gains, drafts = [], []
    for plain, *fixed, _ in speeds_by_batch().values():
        best = max(fixed, key=lambda row: row[END_TO_END])
        gains.append(f"{best[END_TO_END] / plain[END_TO_END]:.2f}")
        drafts.append(str(best["num_drafts"]))
    words = r"(\S+), (\S+), (\S+) and (\S+) times as fast with this module at batch "
    words += r"(\d), (\d), (\d+) and (\d+), end to end"
    yield words, (*gains, *map(str, speeds_by_batch()))
    yield r"end to end, with K = (\d), (\d), (\d) and (\d)", tuple(drafts)
    found = [length(questions, "n1", 3).value or 0.0 for questions in SETS]
    yield r"gives (\d\.\d\d) tokens a round at K = (3), mean of", (f"{sum(found) / 3:.2f}", "3")


def num_stored(name: str) -> int:
    """Parameters in the file of a shipped target."""
    path = ROOT / "assets" / name / "target" / "model.safetensors"
    with safe_open(path, "np") as file:
        tensors = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    return sum(_product(shape) for shape in tensors)


def num_layers(name: str) -> str:
    config = (ROOT / "assets" / name / "target" / "config.json").read_text(encoding="utf8")
    return str(json.loads(config)["num_hidden_layers"])


def _product(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def active_parameters(name: str) -> float:
    """Of a lab target, those that a token meets."""
    return step_costs.active_parameters(built(name), top_k=2)


def parameters(name: str) -> int:
    """Of a lab target, from its configuration."""
    return sum(parameter.numel() for parameter in built(name).parameters())


@cache
def built(name: str) -> nn.Module:
    """A lab target on the meta device."""
    model = compose_config(TrainConfig, ["task=target", f"model={name}"]).model
    sizes = {**model.architecture, "vocab_size": model.pretrain.vocab_size}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model.family, **sizes))


@cache
def claims() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Every pattern with the texts that its groups must have."""
    sources = (matrix_rows, wrong_policy, quickstart, speeds, sizes, released)
    return tuple(claim for source in sources for claim in source())


def accounted(text: str) -> list[str]:
    """What is wrong with the numbers of a text; empty if all of them are computed or listed."""
    faults, spans = [], []
    for pattern, wanted in claims():
        found = list(re.finditer(pattern, text))
        if len(found) != 1:
            faults.append(f"{pattern} is there {len(found)} times")
            continue
        got = found[0].groups()
        if got != wanted:
            faults.append(f"{got} must be {wanted}")
        spans += [found[0].span(index + 1) for index in range(len(got))]
    for pattern in SETTINGS:
        for found in re.finditer(pattern, text):
            spans += [found.span(i + 1) for i in range(len(found.groups())) if found.group(i + 1)]
    for number in NUMBER.finditer(text):
        if not any(start <= number.start() and number.end() <= end for start, end in spans):
            line = text[: number.start()].count("\n") + 1
            faults.append(f"README.md:{line}: {number.group()} has no source")
    return faults


def test_every_number_of_the_readme_is_computed_again() -> None:
    assert accounted(TEXT) == []


def test_readme_shows_what_eval_prints() -> None:
    assert f"```\n{printed()}\n```\n" in TEXT


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("**2.259**", "**2.260**"),
        ("1.49 and 1.50 times", "1.69 and 1.50 times"),
        ("1.27 times", "1.37 times"),
        ("2894", "2895"),
        ("## Words", "## 12 words"),
    ],
)
def test_a_number_that_is_changed_or_added_is_seen(old: str, new: str) -> None:
    assert old in TEXT
    assert len(accounted(TEXT.replace(old, new, 1))) > len(accounted(TEXT))


def test_tables_of_the_wrong_policy_in_results_are_computed_again() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf8")
    names = {"chain_n3": "chain, N = 3", "chain_n1": "chain, N = 1", "ttt_n1": "ttt, N = 1"}
    folders = {"lab_tiny": "fault_price", "lab_base": "lab_base_prices"}
    folders |= {"lab_small": "lab_small_prices"}
    for target, folder in folders.items():
        losses = policy_losses(read_study(RESULTS / folder))
        for name, shown in names.items():
            (head,) = {head for head, _ in losses if name in head}
            own = "eagle" if name.startswith("ttt") else "training"
            cells = [f"| {target} | {shown} | {own} "]
            for num_drafts in (3, 5):
                one = losses[head, num_drafts]
                low, high = one.lost.low, one.lost.high
                cells.append(f"| {one.lost.value:+.3f} [{low:+.3f}, {high:+.3f}] ")
                cells.append(f"| {one.percent.value:.1f} ")
            assert "".join(cells) + "|\n" in page


def test_speed_on_a_cpu_in_results_is_computed_again() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf8")
    costs: list[list[str]] = []
    for batch, (plain, *drafting) in measured_on_a_cpu().items():
        cells = [str(batch), with_ends(plain)]
        for one in drafting:
            cells += [with_ends(one), f"{one.speed.ratio_end_to_end:.2f}"]
        assert f"| {' | '.join(cells)} |\n" in page
        eagle = drafting[0].cost
        seconds = (plain.cost.target_s, eagle.target_s, eagle.draft_s)
        costs.append([f"{1e3 * one:.1f}" for one in seconds])
    one, two, four = costs
    of_target, with_rows, drafts = (
        f"{a}, {b} and {c}" for a, b, c in zip(one, two, four, strict=True)
    )
    assert f"takes {of_target} ms without drafts at batch 1, 2 and 4" in page
    assert f"and {with_rows} with the rows of three drafts, which take {drafts} to make" in page


def with_ends(one: ConditionSummary) -> str:
    """Tokens/s of the median pass, and of the slowest and the fastest."""
    found = one.speed.end_to_end
    return f"{found.value:.1f} ({found.low:.1f} to {found.high:.1f})"


def test_speed_of_lab_base_at_batch_1_and_8_in_results_is_computed_again() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf8")
    found, spreads = on_one_h200(), []
    for batch in (1, 8):
        here = {name: one.speed for name, one in found.items() if name.endswith(f" R={batch}")}
        cells = [str(batch), f"{here[f'baseline R={batch}'].end_to_end.value:,.0f}"]
        for policy in ("eagle", "training"):
            for num_drafts in (2, 3):
                one = here[f"{policy} K={num_drafts} R={batch}"]
                ratios = f"{one.ratio_end_to_end:.2f} ({one.ratio_full:.2f})"
                cells.append(f"{one.end_to_end.value:,.0f}, {ratios}")
        assert f"| {' | '.join(cells)} |\n" in page
        spreads.append(largest_spread({name: found[name] for name in here}))
    at_1, at_8 = (f"{100 * spread:.0f} %" for spread in spreads)
    assert f"at most {at_1} of the median at batch 1 and {at_8} at batch 8" in page


def test_speed_of_lab_base_at_larger_batches_in_results_is_computed_again() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf8")
    spreads, longer = [], []
    for batch in (32, 64, 128):
        found = on_one_h200(f"batch_{batch}")
        plain, *drafting = (one.speed for one in found.values())
        whole = plain.end_to_end
        cells = [str(batch), f"{whole.value:,.0f} ({whole.low:,.0f} to {whole.high:,.0f})"]
        for one in drafting:
            ratios = f"{one.ratio_end_to_end:.2f} ({one.ratio_full:.2f})"
            cells.append(f"{one.end_to_end.value:,.0f}, {ratios}")
        cells += ["-"] * (6 - len(cells))
        assert f"| {' | '.join(cells)} |\n" in page
        spreads.append(f"{100 * largest_spread(found):.0f} %")
        if batch == 32:
            continue
        three, chosen = (one.result for one in list(found.values())[-2:])
        assert chosen.draft_length == "expected_gain"
        assert rounds_of(chosen) == rounds_of(three)
        times = [[one.wall_s for one in result.passes] for result in (three, chosen)]
        assert len(times[0]) == 20
        ratios = [after / before for before, after in zip(*times, strict=True)]
        longer.append(f"{100 * statistics.median(ratios) - 100:.1f}")
        rates = [one.end_to_end.value for one in drafting]
        if batch == 64:
            assert max(rates) == rates[1]
            assert f"K = 2 is {100 * rates[1] / rates[3] - 100:.1f} % faster" in page
        else:
            assert rates[3] > 0.98 * max(rates)
    assert "{} of the median at batch 32, {} at 64 and {} at 128".format(*spreads) in page
    assert "took {} and {} % longer than the pass of K = 3".format(*longer) in page


def rounds_of(result: ConditionResult) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Drafts made and accepted in each round of each prompt."""
    return [(one.num_drafted_per_round, one.num_accepted_per_round) for one in result.records]


def test_how_often_intervals_over_few_prompts_hold_is_measured_again() -> None:
    results = shipped()
    own = next(c for c in results.conditions if c.policy == "training")
    assert own.num_speculative_tokens == 3
    prompts = [(record,) for record in own.records if record.num_accepted_per_round]
    assert len(prompts) == 136
    top, bottom = acceptance_ratios(prompts, num_speculative_tokens=3)["acceptance_length_micro"]
    whole, shares = top.sum() / bottom.sum(), {}
    for count in (2, 3, 5, 10, 20, 40, 80):
        generator, held = np.random.default_rng(count), 0
        for seed in range(1000):
            drawn = generator.integers(len(top), size=count)
            ratios = {"": bootstrap.Ratio(top[drawn], bottom[drawn])}
            one = bootstrap.estimate(ratios, seed=seed, num_draws=1000)[""]
            held += one.low <= whole <= one.high
        shares[count] = held / 1000
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf8")
    row = " | ".join(f"{share:.3f}".lstrip("0") for share in shares.values())
    assert f"| prompts | {' | '.join(map(str, shares))} |\n" in page
    assert f"| share | {row} |\n" in page


def test_table_of_the_policy_matrix_in_results_is_computed_again() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf8")
    rows: dict[str, list[str]] = {}
    for target in TARGETS:
        for one in groups(target):
            value, low, high = texts_of(one.length)
            value = f"**{value}**" if one.is_match else value
            rows.setdefault(one.key.head.replace(" N=", ", N = "), []).append(
                f"{value} [{low}, {high}]"
            )
        own = {g.key.head: g.by_seed for g in groups(target) if g.is_match}
        lengths = ", ".join(f"{one:.3f}" for one in own["chain N=3"])
        assert f"{lengths} ({target})" in page
        widest = max(max(found) - min(found) for found in own.values())
        assert f"{widest:.3f} on {target}" in page
    assert len(rows) == 6
    for name, cells in rows.items():
        assert f"| {name} | {' | '.join(cells)} |\n" in page
