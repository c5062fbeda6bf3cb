from kvhold_lab.bench.load.workloads.chats import Chats
from kvhold_lab.bench.load.workloads.long_doc_qa import LongDocQA
from kvhold_lab.bench.load.workloads.multi_doc_qa import MultiDocQA
from kvhold_lab.bench.load.workloads.multi_round_qa import MultiRoundQA
from kvhold_lab.bench.load.workloads.rag import Rag
from kvhold_lab.bench.load.workloads.replay import Replay
from kvhold_lab.bench.load.workloads.ttft_sweep import TtftSweep

__all__ = ["Chats", "LongDocQA", "MultiDocQA", "MultiRoundQA", "Rag", "Replay", "TtftSweep"]
