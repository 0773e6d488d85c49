"""The kernel benchmarks' common entry, all of them in one run, and peers that may be missing."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from mtp_research.kernels.bench import __main__ as entry
from mtp_research.kernels.bench import bench_append, bench_attention, bench_runner
from mtp_research.kernels.bench.bench_attention import latent_attention_ref, paged_attention_ref
from mtp_research.kernels.bench.bench_runner import Bench

CEILINGS = {"copy_tb_per_s": 4.0, "read_tb_per_s": 4.0, "bf16_tflop_per_s": 700.0}


def test_machine_without_a_gpu_has_versions_and_whether_the_tree_is_changed():
    machine = bench_runner.describe_machine()
    assert machine["python"] == sys.version.split()[0]
    assert machine["transformers"][0].isdigit()
    assert machine["dirty"] in (True, False, None)
    assert machine.keys() >= {"device", "driver", "torch", "triton", "commit"}


def test_all_goes_on_after_a_benchmark_that_fails_and_writes_after_each(tmp_path, monkeypatch):
    path, seen = tmp_path / "rows.json", []

    def fails(ceilings, options):
        raise RuntimeError("out of memory")

    def works(ceilings, options):
        seen.append(json.loads(path.read_text())["rows"])
        return [{"shape": "x", "us": ceilings["copy_tb_per_s"]}]

    monkeypatch.setitem(entry.BENCHES, "append", Bench(fails))
    monkeypatch.setitem(entry.BENCHES, "latent", Bench(works))
    rows = entry.measure_all(CEILINGS, path, names=["append", "latent"])
    assert seen == [[{"module": "append", "failed": "RuntimeError: out of memory"}]]
    assert rows[1] == {"module": "latent", "shape": "x", "us": 4.0}
    assert json.loads(path.read_text())["rows"] == rows


@pytest.mark.parametrize("name", entry.BENCHES)
def test_every_benchmark_takes_the_options_that_all_gives_it(name):
    bench = entry.BENCHES[name]
    assert callable(bench.measure)
    assert entry.make_parser(name).parse_args(bench.words).json is None


def test_benchmark_that_nobody_knows_is_named():
    with pytest.raises(SystemExit, match="got bench_append"):
        entry.measure_all(CEILINGS, None, names=["bench_append"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("words", [["few_rows", "--quick"], ["experts"], ["--all", "distill"]])
def test_every_name_needs_a_device(words, capsys):
    assert entry.main(words) == entry.EXIT_NO_DEVICE
    assert "needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("num_flops", [0, 8_000_000])
def test_row_has_share_of_the_copy_speedup_and_rate(num_flops, capsys):
    row = {"kernel": "k", "shape": "T=1", "bytes": 8_000_000}
    ours, peer = bench_runner.Timing(4.0, 0.5), bench_runner.Timing(6.0, 0.1)
    row = bench_runner.show_row(row, ours, peer, copy=4.0, num_flops=num_flops)
    figures = (row["median_us"], row["spread_us"], row["share_of_copy"], row["peer_us"])
    assert figures == (4.0, 0.5, 0.5, 6.0)
    assert row["speedup"] == 1.5
    assert row.get("tflop_per_s") == (2.0 if num_flops else None)
    assert "50.0% of copy" in capsys.readouterr().out


def test_row_of_a_kernel_that_did_not_run_has_no_figures():
    row = {"kernel": "sweep", "shape": "T=1", "bytes": 8}
    assert bench_runner.show_row(row, None, copy=4.0) == row


def test_rotated_inputs_are_at_least_two_sets_and_at_most_as_many_as_asked_for():
    assert [bench_runner.num_rotated(size) for size in (2**40, 2**24, 1)] == [2, 32, 128]
    assert bench_runner.num_rotated(1, most=64) == 64


def test_append_pairs_differ_in_rows_only():
    pairs = zip(bench_append._PAIRS[::2], bench_append._PAIRS[1::2], strict=True)
    assert [(one.query_len, one._replace(query_len=4) == four) for one, four in pairs] == [
        (1, True),
        (1, True),
    ]


class FakeWrapper:
    """What FlashInfer's wrappers are told, done by our references."""

    def __init__(self, workspace, layout=None):
        assert workspace.dtype is torch.uint8
        assert layout in ("NHD", None)

    def plan(self, starts, page_starts, pages, *rest, **options):
        self.starts, self.options, self.rest = starts, options, rest
        self.table = pages.view(len(page_starts) - 1, -1)
        assert torch.equal(page_starts.diff(), torch.full_like(page_starts[1:], 2))

    def inputs(self, page_size):
        seq_lens = torch.full((len(self.table),), 2 * page_size, dtype=torch.int32)
        if self.options:  # heads: lengths come as those of the last pages
            seq_lens = page_size + self.rest[0]
        rows = int(self.starts[1])
        names = {"block_table": self.table, "seq_lens": seq_lens, "max_query_len": rows}
        return names | {"query_start_loc": self.starts}

    def run(self, query, *caches):
        if self.options:
            key_cache, value_cache = caches[0]
            fixed = self.inputs(key_cache.shape[1]) | {"scale": self.options["sm_scale"]}
            assert self.rest[1:] == (8, 2, 16, 16)
            return paged_attention_ref(query, key_cache=key_cache, value_cache=value_cache, **fixed)
        rope, latents, ropes = caches
        cache = torch.cat((latents, ropes), dim=-1)
        fixed = self.inputs(cache.shape[1]) | {"scale": self.rest[6]}
        assert self.rest[1:6] == (2, 512, 64, 64, True)
        return latent_attention_ref(query, query_rope=rope, latent_cache=cache, **fixed)


def fake_peers():
    flashinfer = ModuleType("flashinfer")
    flashinfer.BatchPrefillWithPagedKVCacheWrapper = FakeWrapper
    flashinfer.mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=FakeWrapper)

    def flash_attn_varlen_func(*, q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, **options):
        assert max_seqlen_k == 32
        assert options["causal"]
        return paged_attention_ref(
            q,
            key_cache=k,
            value_cache=v,
            block_table=options["block_table"],
            seq_lens=options["seqused_k"],
            query_start_loc=cu_seqlens_q,
            max_query_len=max_seqlen_q,
            scale=options["softmax_scale"],
        )

    vllm = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    return {"flashinfer": flashinfer, "vllm": vllm}


@pytest.fixture
def untimed(monkeypatch):
    timing = bench_runner.Timing(5.0, 1.0)
    monkeypatch.setattr(bench_runner, "time_calls", lambda calls: [c() for c in calls] and timing)


def test_peers_over_pages_get_the_lengths_and_pages_of_ours(untimed):
    shape = bench_attention.AttentionShape(3, 32, 4, num_heads=8, num_kv_heads=2, head_dim=16)
    sets = bench_attention.make_attention_inputs(shape, num_sets=2, device="cpu")
    fixed = {"max_query_len": 4, "scale": 0.25}
    expected = paged_attention_ref(**sets[0], **fixed)
    found = bench_runner.time_peers(fake_peers(), sets, expected, **fixed)
    assert found == {"flashinfer": 5.0, "vllm": 5.0}


def test_peer_over_latents_gets_both_parts_of_the_cache(untimed):
    shape = bench_attention.LatentShape(2, 128, 1, num_heads=2)
    sets = bench_attention.make_latent_inputs(shape, num_sets=1, device="cpu")
    fixed = {"max_query_len": 1, "scale": 0.1}
    expected = latent_attention_ref(**sets[0], **fixed)
    found = bench_runner.time_peers(fake_peers(), sets, expected, **fixed)
    assert found == {"flashinfer": 5.0}


def test_peer_that_refuses_gives_its_reason(untimed):
    shape = bench_attention.AttentionShape(1, 32, 1, num_heads=8, num_kv_heads=2, head_dim=16)
    sets = bench_attention.make_attention_inputs(shape, num_sets=1, device="cpu")
    peers = {"vllm": SimpleNamespace()}
    found = bench_runner.time_peers(peers, sets, sets[0]["query"], scale=1.0, max_query_len=1)
    assert found["vllm"].startswith("AttributeError: ")


def test_missing_peers_are_named_and_nothing_else_happens(monkeypatch, capsys):
    for name in ("flashinfer", "vllm", "vllm.vllm_flash_attn"):
        monkeypatch.setitem(sys.modules, name, None)
    assert bench_runner.import_peers() == {}
    printed = capsys.readouterr().out
    assert printed == "flashinfer: not importable\nvllm: not importable\n"
