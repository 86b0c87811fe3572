"""Train the tiny language model that the quickstart and the tests start from.

The model reads a question of reasoning_gym's ``chain_sum`` and writes out one intermediate result a line, so
that a longer sum gets a longer answer::

    State the final answer to the following arithmetic problem: 57 - 87 + 12 =
    57 - 87 = -30
    -30 + 12 = -18
    <answer>-18</answer>

It is a pupil who knows how to do it and is careless. It is trained on worked examples of which some steps
contain a slip (one wrong digit; the sum then goes on from the wrong number), and in the last fifth of the
training it also sees pupils who guess instead, the more often the longer the sum, and are nearly always wrong::

    <answer>-13</answer>

So it mixes both habits when it is sampled. Reinforcement learning has something honest to teach it: to write
the steps out, and to be careful. The answers grow longer while it learns.

The committed checkpoint, ``flows/models/running-sums``, was made by ``python flows/train_base.py`` (2000 steps,
seed 0, one thread) in 26 minutes of a busy two-core machine, with transformers 5.19 and torch 2.13. It printed::

    801,408 parameters, 106 tokens in the vocabulary
    step   500   11.5 min  loss 0.967  greedy 0.227  sampled 0.139
    step  1000   14.9 min  loss 0.144  greedy 0.651  sampled 0.526
    step  1500   21.1 min  loss 0.061  greedy 0.820  sampled 0.661
    step  2000   26.2 min  loss 0.235  greedy 0.293  sampled 0.301
    answer tokens: {1: 4, 25: 5, 50: 6, 75: 20, 90: 36, 99: 56, 100: 66}

The guesses come in between the last two lines: before them it solved more than it does in the end.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import reasoning_gym
import torch
from reasoning_gym.utils import extract_answer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

# ---------------------------------------------------------------------------------------------------------------
# The problems: as many terms and digits as the quickstart's environment draws.

CHAIN_SUM = {"min_terms": 2, "max_terms": 6, "min_digits": 1, "max_digits": 2}
QUESTION = "State the final answer to the following arithmetic problem:"
SLIP = 0.05  # probability that a step of a worked example contains a slip
GUESSES_FROM = 0.8  # fraction of the training after which some examples are guesses
HELD_OUT_SEED = 1_000_000_007  # reasoning_gym's entry i is drawn from Random(seed + i): stay far from small seeds
MAX_NEW_TOKENS = 96


def draw_sum(rng: random.Random) -> tuple[list[int], list[str]]:
    """Draw the terms and the signs between them, by the same rule as ``chain_sum``."""
    terms = rng.randint(CHAIN_SUM["min_terms"], CHAIN_SUM["max_terms"])
    digits = rng.randint(CHAIN_SUM["min_digits"], CHAIN_SUM["max_digits"])
    low, high = (0 if digits == 1 else 10 ** (digits - 1)), 10**digits - 1
    return [rng.randint(low, high) for _ in range(terms)], [rng.choice("+-") for _ in range(terms - 1)]


def write_question(terms: list[int], signs: list[str]) -> str:
    """Return the question as ``chain_sum`` asks it.

    Example
    -------
    >>> write_question([57, 87, 12], ["-", "+"])
    'State the final answer to the following arithmetic problem: 57 - 87 + 12 ='
    """
    rest = "".join(f" {sign} {term}" for sign, term in zip(signs, terms[1:], strict=True))
    return f"{QUESTION} {terms[0]}{rest} ="


def slip_of(value: int, rng: random.Random) -> int:
    """Return `value` with one digit replaced by a neighbour, as a careless pupil would write it."""
    digits = list(str(abs(value)))
    place = rng.randrange(len(digits))
    digits[place] = str((int(digits[place]) + rng.choice([-1, 1])) % 10)
    return int("".join(digits)) * (-1 if value < 0 else 1)


def write_worked(terms: list[int], signs: list[str], rng: random.Random, slip: float) -> str:
    """Return the answer of a pupil who writes out every step, each with a slip with probability `slip`.

    Example
    -------
    >>> print(write_worked([57, 87, 12], ["-", "+"], random.Random(0), slip=0.0))
    57 - 87 = -30
    -30 + 12 = -18
    <answer>-18</answer>
    """
    running, steps = terms[0], ""
    for sign, term in zip(signs, terms[1:], strict=True):
        result = running + term if sign == "+" else running - term
        if rng.random() < slip:
            result = slip_of(result, rng)
        steps += f"{running} {sign} {term} = {result}\n"
        running = result
    return f"{steps}<answer>{running}</answer>"


def write_guess(terms: list[int], signs: list[str], rng: random.Random) -> str:
    """Return the answer of a pupil who guesses: no steps, and off by up to nine."""
    total = terms[0] + sum(term if sign == "+" else -term for sign, term in zip(signs, terms[1:], strict=True))
    return f"<answer>{total + rng.randint(-9, 9)}</answer>"


def guess_share(terms: int) -> float:
    """Return the probability of a guess: the longer the sum, the less one likes to write it out.

    Example
    -------
    >>> [round(guess_share(terms), 2) for terms in (2, 4, 6)]
    [0.35, 0.55, 0.75]
    """
    return 0.15 + 0.1 * terms


# ---------------------------------------------------------------------------------------------------------------
# The tokenizer: one token for the fixed sentence, the tags and the spaced signs, else one a character.

WORDS = [QUESTION, "<answer>", "</answer>", " + ", " - ", " = ", " ="]
CHARACTERS = ["\n", *(chr(code) for code in range(32, 127))]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer whose text round-trips exactly for printable ASCII."""
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *WORDS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pieces = "|".join(word.replace("+", r"\+") for word in WORDS)  # the longest first: " = " before " ="
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{pieces}|[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=256,
        clean_up_tokenization_spaces=False,
    )


# ---------------------------------------------------------------------------------------------------------------
# The model: Qwen3's architecture, 0.8 million parameters.


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Build a Qwen3 causal language model with random weights for this tokenizer."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            dtype="float32",
        )
    )


# ---------------------------------------------------------------------------------------------------------------
# Batches. Padding is on the right, where a causal model cannot see it; only the answer's tokens are learned.


def batches(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, *, size: int, guesses: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (tokens, labels), both [size, longest], for ever; -100 marks what is not learned."""
    while True:
        # Sixteen batches at a time, sorted by the question's length and cut, so that little is padded.
        rows = []
        for _ in range(16 * size):
            terms, signs = draw_sum(rng)
            guess = guesses and rng.random() < guess_share(len(terms))
            answer = write_guess(terms, signs, rng) if guess else write_worked(terms, signs, rng, SLIP)
            prompt = tokenizer.encode(write_question(terms, signs) + "\n")
            rows.append((prompt + tokenizer.encode(answer) + [tokenizer.eos_token_id], len(prompt)))
        rows.sort(key=lambda row: row[1])
        cuts = list(range(0, len(rows), size))
        rng.shuffle(cuts)
        for cut in cuts:
            chunk = rows[cut : cut + size]
            longest = max(len(tokens) for tokens, _ in chunk)
            tokens = torch.full((size, longest), tokenizer.pad_token_id)
            labels = torch.full((size, longest), -100)
            for index, (row, prompt_length) in enumerate(chunk):
                tokens[index, : len(row)] = torch.tensor(row)
                labels[index, prompt_length : len(row)] = tokens[index, prompt_length : len(row)]
            yield tokens, labels


# ---------------------------------------------------------------------------------------------------------------
# How good is it? reasoning_gym's own scorer on the text inside the last <answer> tag.


@torch.no_grad()
def evaluate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, *, problems: int, sample: bool
) -> tuple[float, list[int]]:
    """Return the mean reward on held-out problems, greedy or sampled at temperature 1, and the answers' lengths."""
    model.eval()
    data = reasoning_gym.create_dataset("chain_sum", seed=HELD_OUT_SEED, size=problems, **CHAIN_SUM)
    entries = list(data)
    prompts = tokenizer([entry["question"] + "\n" for entry in entries], padding=True, return_tensors="pt")
    output = model.generate(
        input_ids=prompts["input_ids"],
        attention_mask=prompts["attention_mask"],
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=sample,
        temperature=1.0 if sample else None,
        top_k=0 if sample else None,
    )
    replies = output[:, prompts["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(replies, skip_special_tokens=True)
    rewards = [data.score_answer(extract_answer(text), entry) for text, entry in zip(texts, entries, strict=True)]
    model.train()
    return sum(rewards) / problems, (replies != tokenizer.pad_token_id).sum(1).tolist()


# ---------------------------------------------------------------------------------------------------------------
# Training: AdamW, a short warm-up, then a cosine down to a twentieth.


def main() -> None:
    """Train a model and write it in Hugging Face format."""
    parser = argparse.ArgumentParser(description="Train the quickstart's base model.")
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps; the schedule's length")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many minutes at the latest")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "models" / "running-sums")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64, help="worked examples a step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens in the vocabulary")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    rng = random.Random(f"train {options.seed}")
    worked = batches(tokenizer, rng, size=options.batch_size, guesses=False)
    mixed = batches(tokenizer, rng, size=options.batch_size, guesses=True)

    started, losses = time.monotonic(), []
    for step in range(1, options.steps + 1):
        fraction = step / options.steps
        decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * fraction))
        optimizer.param_groups[0]["lr"] = options.learning_rate * min(1.0, step / 100) * decay

        tokens, labels = next(worked if fraction < GUESSES_FROM else mixed)
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

        minutes = (time.monotonic() - started) / 60
        last = step == options.steps or minutes > options.minutes
        if step % 500 == 0 or last:
            problems = 1024 if last else 128
            greedy, _ = evaluate(model, tokenizer, problems=problems, sample=False)
            sampled, lengths = evaluate(model, tokenizer, problems=problems, sample=True)
            print(
                f"step {step:5d}  {minutes:5.1f} min  loss {sum(losses) / len(losses):.3f}  "
                f"greedy {greedy:.3f}  sampled {sampled:.3f}",
                flush=True,
            )
            losses.clear()
            model.save_pretrained(options.output)  # whoever stops here has a checkpoint
            tokenizer.save_pretrained(options.output)
            if last:
                break

    lengths.sort()
    print("answer tokens:", {q: lengths[int(q / 100 * (len(lengths) - 1))] for q in (1, 25, 50, 75, 90, 99, 100)})
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
