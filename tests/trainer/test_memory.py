"""verl #831, NeMo-RL #1057: out of memory only when a run is saved or resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOM = 1.05

TRAIN = """
import json, sys
import torch
from pathlib import Path
from laminar.trainer.config import GRPO, AdamW
from laminar.trainer.learner import Learner
from tests.trainer.micro import rows

torch.set_num_threads(1)

def peak():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))
    found = int(line.split()[1]) << 10
    Path("/proc/self/clear_refs").write_text("5")
    return found

def learner(load, *where):
    return load(*where, GRPO(), AdamW(), temperature=1.0, seed=0)

what, model, checkpoint = sys.argv[1:]
if what == "resume":
    one = learner(Learner.load, checkpoint)
    seen = {"resume": peak()}
else:
    one, seen = learner(Learner, model), {}
for seed in range(2):
    one.step(rows((2,), seed=seed), version=3)
seen["train"] = peak()
if what == "save":
    one.save(checkpoint, step=2, version=3, extra={})
    seen["save"] = peak()
    one.step(rows((2,), seed=3), version=3)
    seen["train again"] = peak()
print(json.dumps(seen))
"""


def run(*arguments: str) -> dict[str, int]:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", TRAIN, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def large_model(folder: Path) -> Path:
    """48 M parameters, of which training holds four copies: 770 MB."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=96,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=7,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def test_saving_and_resuming_take_no_more_memory_than_training(tmp_path: Path) -> None:
    model, checkpoint = str(large_model(tmp_path / "model")), str(tmp_path / "step-000002")
    saved = run("save", model, checkpoint)
    resumed = run("resume", model, checkpoint)
    print(saved, resumed)
    assert saved["train"] > 4 * 4 * 48e6, "the model is what counts here"
    assert max(saved["save"], saved["train again"]) < ROOM * saved["train"], saved
    assert max(resumed["resume"], resumed["train"]) < ROOM * saved["train"], (saved, resumed)
