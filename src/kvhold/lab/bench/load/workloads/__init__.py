"""One workload a file: generators of requests, without a clock and without I/O but for the files
that they read.

A workload is a frozen dataclass whose fields are its arguments, and meets
`kvhold.lab.bench.load.work.Workload`.
"""

from kvhold.lab.bench.load.workloads.long_doc_qa import LongDocQA
from kvhold.lab.bench.load.workloads.multi_doc_qa import MultiDocQA
from kvhold.lab.bench.load.workloads.multi_round_qa import MultiRoundQA
from kvhold.lab.bench.load.workloads.rag import Rag
from kvhold.lab.bench.load.workloads.replay import Replay
from kvhold.lab.bench.load.workloads.ttft_sweep import TtftSweep

__all__ = ["LongDocQA", "MultiDocQA", "MultiRoundQA", "Rag", "Replay", "TtftSweep"]
