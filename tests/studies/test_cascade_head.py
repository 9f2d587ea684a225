"""Test a trained head as the first stage of a cascade. Its steps are compared with drafting one
token at a time, and its cycles with hand counts. It must also learn to count.
"""

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

FOLDERS = ("benchmarks", "studies/cascade")
MODULES = ("common", "eagle", "head", "history", "tables_cascade")
REQUIRED = ("tyro",)
WORDS = 32


def llama(**changed) -> LlamaForCausalLM:
    """Return a small policy with random weights."""
    torch.manual_seed(0)
    settings = dict(
        vocab_size=WORDS,
        hidden_size=WORDS,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=False,
        eos_token_id=2,
    )
    return LlamaForCausalLM(LlamaConfig(**settings | changed)).eval().requires_grad_(False)


@pytest.fixture
def counting():
    """Return a policy whose next token is nearly always the previous token plus one."""
    policy = llama()
    for layer in policy.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    policy.model.embed_tokens.weight.copy_(torch.eye(WORDS))
    policy.lm_head.weight.copy_(4 * torch.eye(WORDS).roll(1, 0))
    return policy


def counted(first: int, length: int) -> list[int]:
    return [(first + place) % WORDS for place in range(length)]


def test_each_step_equals_drafting_one_token_at_a_time(study):
    policy = llama()
    head = study.eagle.Head(policy)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, 0, 0.3)
    reading = study.eagle.read(policy, torch.randint(WORDS, (9,)).tolist())
    embedded = policy.model.embed_tokens(reading.tokens_N[1:])
    states = reading.states_NS[:-1]
    with torch.no_grad():
        steps = head(embedded, states, 4)
        for slot in range(3, 8):
            for step in range(4):
                hidden = head.fc(states[: slot - step + 1])
                for _ in range(step + 1):
                    count = len(hidden)
                    rotation = head.rotary(hidden, torch.arange(count)[None])
                    q, k, v = head.midlayer.qkv(embedded[:count], hidden, rotation)
                    mixed = study.eagle.attend(q, [k], [v])
                    output = head.midlayer.after_attention(hidden, mixed)
                    hidden = torch.cat([hidden, output[-1:]])
                torch.testing.assert_close(steps[step][slot], head.norm(output[-1]))


def test_the_head_sees_no_later_token_and_starts_as_a_copy_of_the_last_layer(study):
    policy = llama()
    head = study.eagle.Head(policy)
    tokens = torch.randint(WORDS, (8,)).tolist()
    reading = study.eagle.read(policy, tokens)
    changed = study.eagle.read(policy, [*tokens[:-1], (tokens[-1] + 1) % WORDS])
    for weight in head.parameters():
        weight.data += 0.1 * torch.randn_like(weight)
    with torch.no_grad():
        one, other = (
            head(policy.model.embed_tokens(each.tokens_N[1:]), each.states_NS[:-1], 3)
            for each in (reading, changed)
        )
    for step in range(3):  # slots before the step have no meaning
        assert torch.equal(one[step][step:-1], other[step][step:-1])
        assert not torch.equal(one[step][-1], other[step][-1])

    query = study.eagle.Head(policy).midlayer.self_attn["q_proj"].weight
    assert torch.equal(query[:, WORDS:], policy.model.layers[-1].self_attn.q_proj.weight)
    assert not query[:, :WORDS].any()


def test_loss_compares_each_slot_with_the_policy_at_the_next_token(study):
    policy = llama()
    head = study.eagle.Head(policy)
    reading = study.eagle.read(policy, torch.randint(WORDS, (6,)).tolist())
    wanted = policy(reading.tokens_N[None]).logits[0].div(0.7).log_softmax(-1)[3]
    output = study.eagle.outputs(head, policy, reading, 2)[1][2]
    own = (policy.lm_head.weight @ output.float()).div(0.7).log_softmax(-1)
    kl = (wanted.exp() * (wanted - own)).sum()
    found = study.eagle.losses(head, policy, reading, 0.7, 2, torch.tensor([0, 2]))
    torch.testing.assert_close(found[1], kl)  # slot 0 has no meaning in step 1


@pytest.mark.parametrize(
    ("accepted", "start"),
    [
        ([[0, 0, 0, 0]], [1, 1, 1, 1]),
        ([[1] * 6] * 2, [1, 0, 0, 1, 0, 0]),
        ([[0.5] * 3], [1, 0.5, 0.75]),
        # The first draft is always accepted, and the second is accepted half of the time.
        ([[1, 1, 1, 1], [0.5] * 4], [1, 0, 0.5, 0.5]),
    ],
)
def test_cycle_start_probabilities_match_a_hand_calculation(study, accepted, start):
    assert study.head.starts(np.array(accepted, float)).tolist() == start


def test_guesses_are_kept_up_to_the_first_wrong_one(study):
    is_guessed = np.array([[1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0]], bool)
    kept = study.head.kept_by_head(is_guessed)
    assert kept.tolist() == [2, 0, 2, 1]  # 0 0, 1 1 and 2 2 are kept; then the response ends
    # If the same guesses are used as drafts, cycles start at tokens 0 and 3.
    assert study.head.starts(is_guessed.astype(float)).tolist() == [1, 0, 0, 1]
    assert study.history.passes(kept, 3, 4) == [2]


def test_history_replaces_the_head_only_where_enough_tokens_repeat(study):
    prompt = [5, 6, 7, 8]
    response = [6, 7, 8, 9, 9]
    by_head = np.array([2, 3, 0, 1, 1])
    # Before tokens 1, 2 and 3, the last one, two and three tokens have occurred before.
    mixed = [study.head.kept_by_mix(prompt, response, by_head, 3, least) for least in (1, 2, 3, 8)]
    assert [kept.tolist() for kept in mixed] == [
        [2, 2, 1, 0, 1],
        [2, 3, 1, 0, 1],
        [2, 3, 0, 0, 1],
        [2, 3, 0, 1, 1],
    ]


def test_overlap_and_acceptance_match_a_direct_computation(study):
    policy = llama()
    head = study.eagle.Head(policy)
    tokens = torch.randint(WORDS, (9,)).tolist()
    reading = study.eagle.read(policy, tokens)
    found = study.head.measure(head, policy, reading, 5, 0.7, 2)
    p = policy(torch.tensor([tokens])).logits[0].div(0.7).softmax(-1)[4:-1]
    for draft, output in enumerate(study.eagle.outputs(head, policy, reading, 2)):
        q = (output.float() @ policy.lm_head.weight.T).div(0.7).softmax(-1)[3:-1]
        place = torch.arange(4), torch.tensor(tokens[5:])
        overlap, accepted = torch.minimum(p, q).sum(1), (q[place] / p[place]).clamp(max=1)
        np.testing.assert_allclose(found.overlap[draft], overlap.detach(), rtol=1e-4)
        np.testing.assert_allclose(found.accepted[draft], accepted.detach(), rtol=1e-4)
        assert found.is_guessed[draft].tolist() == (q.argmax(1) == place[1]).tolist()


@pytest.fixture
def samples(tmp_path):
    """Save two responses of 24 tokens to each of 16 prompts. The responses count upwards, so
    history cannot guess them.
    """
    arrays = {}
    for number in range(16):
        key = f"counting/1.0/{number}"
        arrays[f"{key}/prompt"] = np.array(counted(2 * number, 4), np.int32)
        for place in range(2):
            arrays[f"{key}/{place}"] = np.array(counted(2 * number + 4, 24), np.int32)
            arrays[f"{key}/{place}/logprobs"] = np.full(24, -0.5, np.float16)
    np.savez_compressed(tmp_path / "samples.npz", **arrays)
    return tmp_path / "samples.npz"


def test_the_head_learns_to_count(study, samples, counting, tmp_path, monkeypatch, capsys):
    loading = SimpleNamespace(load_model=lambda name, precision: (counting, None))
    monkeypatch.setitem(sys.modules, "sparrow.cli.loading", loading)
    out, folder = tmp_path / "cascade_head.json", tmp_path / "checkpoint"
    options = study.head.Options(
        samples,
        out,
        held_out=2,
        edges=(0, 16, 32, 64),
        epochs=15,
        learning_rate=1e-2,
        sequences=2,
        save=folder,
    )
    result = study.head.main(options)
    training, cell = result["training"], result["cells"][0]
    assert (training["texts"], training["tokens"], training["updates"]) == (28, 28 * 28, 210)
    assert training["last_loss"][0] < 0.1 * training["first_loss"][0]
    assert "update 200 of 210" in capsys.readouterr().out

    three, seven = cell["rows"]
    assert (cell["prompts"], cell["tokens"], cell["nats"]) == (2, 96, [0.5] * 3)
    assert 3.5 < three["head"][0] == three["both"][0] <= three["most_likely"][0] <= 4
    assert 5 < seven["head"][0] <= 6  # 12 drafts take a pass of eight and one of four
    assert three["history"] == [1] * 3  # no token has occurred before
    assert 3 < three["drawn"][0] <= 4
    assert min(cell["acceptance"][: options.steps]) > 0.6  # the head trained for only these
    bins = [(row["from"], row["to"], row["tokens"]) for row in cell["positions"]]
    assert bins == [(0, 16, 4 * 12), (16, 32, 4 * 12)]

    names = json.loads((folder / "config.json").read_text())
    assert names["architectures"] == ["LlamaForCausalLMEagle3"] and names["num_hidden_layers"] == 1
    assert names["eagle_aux_hidden_state_layer_ids"] == [2, 3, 3]
    monkeypatch.setattr(study.tables_cascade, "load", lambda _: study.common.read_result(out))
    table = study.tables_cascade.TABLES["cascade head"]()
    assert "| counting | 1 | 0.50 | 3 | 1.00 [1.00, 1.00] | " in table
    mixed = study.tables_cascade.TABLES["cascade head mixed"]()
    assert "| head alone | history from 1 token | history from 2 tokens | " in mixed
    assert f"| counting | 1 | 0.50 | 3 | 1.00 | {three['head'][0]:.2f} | " in mixed
    positions = study.tables_cascade.TABLES["cascade head positions"]()
    assert "| 0 to 16 | 16 to 32 |" in positions


def test_no_prompt_is_both_trained_on_and_held_out(study):
    found = [
        study.history.Group("stories", temperature, [prompt], [[1]], 0.5)
        for temperature in (0.7, 1.0)
        for prompt in (1, 2, 1, 3)
    ]
    learned, held_out = study.head.divided(found, 1)
    assert [group.prompt for group in learned] == [[1], [2], [1]] * 2
    assert [group.prompt for group in held_out] == [[3]] * 2
    with pytest.raises(ValueError, match="holding out 3 of 3 prompts for stories leaves none"):
        study.head.divided(found, 3)
