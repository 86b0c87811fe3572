"""vLLM's half of Laminar: what is loaded into vLLM's own processes. Nothing yet; the engine is still to come."""
