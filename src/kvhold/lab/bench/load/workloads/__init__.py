"""One workload a file: a frozen dataclass that implements `kvhold.lab.bench.load.work.Workload`."""

from kvhold.lab.bench.load.workloads.long_doc_qa import LongDocQA
from kvhold.lab.bench.load.workloads.multi_doc_qa import MultiDocQA
from kvhold.lab.bench.load.workloads.multi_round_qa import MultiRoundQA
from kvhold.lab.bench.load.workloads.rag import Rag
from kvhold.lab.bench.load.workloads.replay import Replay
from kvhold.lab.bench.load.workloads.ttft_sweep import TtftSweep

__all__ = ["LongDocQA", "MultiDocQA", "MultiRoundQA", "Rag", "Replay", "TtftSweep"]
