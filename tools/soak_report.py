"""What `soak.py` found, and which of it must not be."""

import resource
from dataclasses import dataclass, field
from pathlib import Path

MAX_SLOPE_KIB = 10.0  # resident memory per 100 requests over the second half: 0.1 KiB a request


@dataclass
class Report:
    """What a soak found; every field of the last block must be zero or empty."""

    num_requests: int = 0
    num_aborted: int = 0
    num_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_evicted_blocks: int = 0
    acceptance_length: float = 1.0
    seconds: float = 0.0
    rss_first_mib: float = 0.0
    rss_last_mib: float = 0.0
    rss_slope_kib_per_100_requests: float = 0.0
    num_different: int = 0
    num_leaked_blocks: int = 0
    num_dirty_rounds: int = 0
    violations: list[str] = field(default_factory=list)


def judge(report: Report, rss: list[tuple[int, float]]) -> None:
    """Fill in the memory figures and list what must not be.

    Args:
        report: its other figures are complete.
        rss: after each wave, the requests so far and the resident memory in MiB.
    """
    later = rss[len(rss) // 2 :]
    report.rss_first_mib, report.rss_last_mib = rss[0][1], rss[-1][1]
    report.rss_slope_kib_per_100_requests = slope(later) * 1024 * 100
    for name in ("num_different", "num_leaked_blocks", "num_dirty_rounds"):
        if value := getattr(report, name):
            report.violations.append(f"{name} is {value}")
    if report.num_preemptions == 0:
        report.violations.append("the pool forced no preemption")
    is_long = len(later) >= 10  # fewer points say nothing about a slope
    if is_long and report.rss_slope_kib_per_100_requests > MAX_SLOPE_KIB:
        report.violations.append(f"memory grows: {report.rss_slope_kib_per_100_requests:.2f} KiB")


def slope(points: list[tuple[int, float]]) -> float:
    """Least-squares slope of y over x; 0 for a single point."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def rss_mib() -> float:
    """Resident memory of this process now."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return num_pages * resource.getpagesize() / 2**20
