"""One workload a file: generators of requests, without a clock and without I/O but for the files that they read.

A workload is a frozen dataclass whose fields are its arguments, and meets `kvhold.cli.bench.load.work.Workload`.
"""

from kvhold.cli.bench.load.workloads.long_doc_qa import LongDocQA
from kvhold.cli.bench.load.workloads.multi_doc_qa import MultiDocQA
from kvhold.cli.bench.load.workloads.multi_round_qa import MultiRoundQA
from kvhold.cli.bench.load.workloads.rag import Rag
from kvhold.cli.bench.load.workloads.replay import Replay
from kvhold.cli.bench.load.workloads.ttft_sweep import TtftSweep

__all__ = ["LongDocQA", "MultiDocQA", "MultiRoundQA", "Rag", "Replay", "TtftSweep"]
