from kvhold.integrations.vllm.naming.walk import engine_facts, machine_facts

__all__ = ["engine_facts", "machine_facts"]
