"""Drives a running server with the official `openai` package.

Usage: test_openai.py ENDPOINT
Each case is a function; the first failed assertion ends its case, the others still run.
Exit status 0 when all pass, 1 otherwise.
"""

import sys
import traceback

import openai

PROMPT = "The sea was calm, and the captain"
MESSAGES = [{"role": "user", "content": "Write one sentence about the sea."}]
GREEDY = {"temperature": 0, "max_tokens": 24}


def models_are_listed(client, model):
    listed = client.models.list().data
    assert model in [entry.id for entry in listed], listed
    assert client.models.retrieve(model).id == model


def chat_answers(client, model):
    answer = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    assert answer.object == "chat.completion", answer
    choice = answer.choices[0]
    assert choice.message.role == "assistant", choice
    assert choice.message.content, choice
    assert choice.finish_reason in ("stop", "length"), choice
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens, answer.usage
    assert 1 <= answer.usage.completion_tokens <= 24, answer.usage


def chat_takes_every_role_and_content_parts(client, model):
    answer = client.chat.completions.create(
        model=model,
        messages=[
            {"role": "system", "content": "Answer in one word."},
            {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "And 3 + 3?"},
        ],
        **GREEDY,
    )
    assert answer.choices[0].message.content, answer


def chat_streams_the_same_text(client, model):
    whole = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY)
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    text, reasons, usage, roles = "", [], None, []
    for chunk in stream:
        assert chunk.object == "chat.completion.chunk", chunk
        if chunk.choices:
            delta = chunk.choices[0].delta
            text += delta.content or ""
            if delta.role:
                roles.append(delta.role)
            if chunk.choices[0].finish_reason:
                reasons.append(chunk.choices[0].finish_reason)
        if chunk.usage:
            usage = chunk.usage
    assert text == whole.choices[0].message.content, (text, whole)
    assert reasons == [whole.choices[0].finish_reason], reasons
    assert roles == ["assistant"], roles
    # How much was drafted is a matter of speed, and may differ from one answer to the next.
    assert counts(usage) == counts(whole.usage), (usage, whole.usage)


def counts(usage):
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def completions_stream_the_same_text(client, model):
    whole = client.completions.create(model=model, prompt=PROMPT, **GREEDY)
    assert whole.object == "text_completion", whole
    stream = client.completions.create(model=model, prompt=PROMPT, stream=True, **GREEDY)
    text, reasons = "", []
    for chunk in stream:
        text += chunk.choices[0].text
        if chunk.choices[0].finish_reason:
            reasons.append(chunk.choices[0].finish_reason)
    assert text == whole.choices[0].text, (text, whole)
    assert reasons == [whole.choices[0].finish_reason], reasons


def several_prompts_are_answered_in_order(client, model):
    prompts = ["One, two, three,", "The capital of France is"]
    together = client.completions.create(model=model, prompt=prompts, **GREEDY)
    assert [choice.index for choice in together.choices] == [0, 1], together
    for prompt, choice in zip(prompts, together.choices):
        alone = client.completions.create(model=model, prompt=prompt, **GREEDY)
        assert choice.text == alone.choices[0].text, (choice, alone)


def n_gives_that_many_different_choices(client, model):
    answer = client.chat.completions.create(model=model, messages=MESSAGES, n=3, temperature=1.0, seed=7, max_tokens=24)
    assert [choice.index for choice in answer.choices] == [0, 1, 2], answer
    assert len({choice.message.content for choice in answer.choices}) > 1, answer
    again = client.chat.completions.create(model=model, messages=MESSAGES, n=3, temperature=1.0, seed=7, max_tokens=24)
    assert [c.message.content for c in again.choices] == [c.message.content for c in answer.choices], (again, answer)


def n_streams_every_choice(client, model):
    sampled = {"n": 2, "temperature": 1.0, "seed": 11, "max_tokens": 16}
    whole = client.chat.completions.create(model=model, messages=MESSAGES, **sampled)
    texts = {0: "", 1: ""}
    for chunk in client.chat.completions.create(model=model, messages=MESSAGES, stream=True, **sampled):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert [texts[0], texts[1]] == [choice.message.content for choice in whole.choices], (texts, whole)


def seed_repeats(client, model):
    def sample(seed):
        answer = client.chat.completions.create(
            model=model, messages=MESSAGES, temperature=1.0, top_p=0.95, seed=seed, max_tokens=24
        )
        return answer.choices[0].message.content

    first = sample(42)
    assert sample(42) == first
    assert any(sample(seed) != first for seed in range(5)), first


def chat_logprobs_describe_the_tokens(client, model):
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens, (len(entries), answer.usage)
    for entry in entries:
        assert entry.logprob <= 0, entry
        assert len(entry.top_logprobs) == 3, entry
        likely = [top.logprob for top in entry.top_logprobs]
        assert likely == sorted(likely, reverse=True), entry
        assert entry.token == entry.top_logprobs[0].token, entry
        assert entry.logprob == likely[0], entry
    text = b"".join(bytes(entry.bytes) for entry in entries).decode("utf-8", "replace")
    assert text.startswith(answer.choices[0].message.content), (text, answer)


def completion_logprobs_describe_the_tokens(client, model):
    answer = client.completions.create(model=model, prompt=PROMPT, logprobs=2, **GREEDY)
    logprobs = answer.choices[0].logprobs
    count = answer.usage.completion_tokens
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == count, logprobs
    assert all(value <= 0 for value in logprobs.token_logprobs), logprobs
    assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs), logprobs


def echo_scores_the_prompt(client, model):
    answer = client.completions.create(model=model, prompt=PROMPT, echo=True, logprobs=1, max_tokens=4, temperature=0)
    assert answer.choices[0].text.startswith(PROMPT), answer
    values = answer.choices[0].logprobs.token_logprobs
    assert values[0] is None and all(value <= 0 for value in values[1:]), values


def stop_ends_the_text(client, model):
    free = client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY).choices[0].message.content
    stop = free[len(free) // 2 :][:4]
    stopped = client.chat.completions.create(model=model, messages=MESSAGES, stop=[stop, "\x00never"], **GREEDY)
    assert stopped.choices[0].message.content == free.split(stop)[0], (stop, stopped, free)
    assert stopped.choices[0].finish_reason == "stop", stopped
    text = ""
    for chunk in client.chat.completions.create(model=model, messages=MESSAGES, stop=stop, stream=True, **GREEDY):
        text += chunk.choices[0].delta.content or ""
    assert text == free.split(stop)[0], (stop, text, free)


def logit_bias_forbids_a_token(client, model):
    free = client.completions.create(model=model, prompt=PROMPT, extra_body={"return_token_ids": True}, **GREEDY)
    first = free.choices[0].model_extra["token_ids"][0]
    biased = client.completions.create(
        model=model, prompt=PROMPT, logit_bias={str(first): -100}, extra_body={"return_token_ids": True}, **GREEDY
    )
    assert biased.choices[0].model_extra["token_ids"][0] != first, biased


def expect(error_type, status, call, *parts):
    try:
        answer = call()
    except error_type as error:
        assert error.status_code == status, error
        for part in parts:
            assert part in str(error), (part, error)
        assert error.type, error
    else:
        raise AssertionError(f"no {error_type.__name__} but {answer}")


def bad_requests_raise_the_typed_error(client, model):
    def chat(**fields):
        return lambda: client.chat.completions.create(**{"model": model, "messages": MESSAGES, **fields})

    expect(openai.BadRequestError, 400, chat(temperature=3.5), "temperature")
    expect(openai.BadRequestError, 400, chat(top_p=-1), "top_p")
    expect(openai.BadRequestError, 400, chat(max_tokens=-5), "max_tokens")
    expect(openai.BadRequestError, 400, chat(n=0), "n")
    expect(openai.BadRequestError, 400, chat(n=100_000), "n")
    expect(openai.BadRequestError, 400, chat(messages=[]), "messages")
    expect(openai.BadRequestError, 400, chat(stop=["a", "b", "c", "d", "e"]), "stop")
    expect(openai.BadRequestError, 400, chat(extra_body={"no_such_field": 1}), "no_such_field")
    expect(openai.BadRequestError, 400, lambda: client.completions.create(model=model, prompt=""), "prompt")


def an_unknown_model_raises_not_found(client, model):
    def call():
        return client.chat.completions.create(model="no-such-model", messages=MESSAGES)

    expect(openai.NotFoundError, 404, call, "no-such-model")


def a_prompt_longer_than_the_context_raises_the_typed_error(client, model):
    def call():
        return client.completions.create(model=model, prompt="word " * 20_000, max_tokens=4)

    expect(openai.BadRequestError, 400, call, "tokens")


def the_next_request_after_all_errors_is_served(client, model):
    assert client.chat.completions.create(model=model, messages=MESSAGES, **GREEDY).choices[0].message.content


CASES = [
    models_are_listed,
    chat_answers,
    chat_takes_every_role_and_content_parts,
    chat_streams_the_same_text,
    completions_stream_the_same_text,
    several_prompts_are_answered_in_order,
    n_gives_that_many_different_choices,
    n_streams_every_choice,
    seed_repeats,
    chat_logprobs_describe_the_tokens,
    completion_logprobs_describe_the_tokens,
    echo_scores_the_prompt,
    stop_ends_the_text,
    logit_bias_forbids_a_token,
    bad_requests_raise_the_typed_error,
    an_unknown_model_raises_not_found,
    a_prompt_longer_than_the_context_raises_the_typed_error,
    the_next_request_after_all_errors_is_served,
]


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: test_openai.py ENDPOINT")
    client = openai.OpenAI(base_url=f"{sys.argv[1].rstrip('/')}/v1", api_key="none", max_retries=0, timeout=300)
    model = client.models.list().data[0].id
    failed = 0
    for case in CASES:
        try:
            case(client, model)
        except Exception:
            failed += 1
            print(f"FAILED {case.__name__}")
            traceback.print_exc(file=sys.stdout)
        else:
            print(f"ok {case.__name__}")
    print(f"{len(CASES) - failed} of {len(CASES)} cases passed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
