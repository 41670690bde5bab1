"""Any model here as lm-evaluation-harness asks it (0.4.13), in three ways:

request                 answer
loglikelihood           log p of a continuation after a context, and whether greedy decoding has it
loglikelihood_rolling   log p of a whole text
generate_until          a continuation, as far as a text that ends it

The first two are scored in parallel, hard-stopped at tau, as decoding has it; the third is decoded.
Where a request does not fit the model's window, the beginning of its context is left out.
"""

import json
from collections import deque
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.batching import Engine, serves
from evaluation.scoring import Window, batches, states
from router import upcast
from runtime import UserError
from sample import stream


@dataclass
class Count:
    """What was read for the answers so far."""

    tokens: int = 0
    steps: int = 0  # executed
    requests: int = 0
    cut: int = 0  # requests whose context lost its beginning


def harness_lm(*args, **kwargs):
    """The Answers of a model in the form that lm_eval.simple_evaluate asks for; same arguments."""
    from lm_eval.api.model import TemplateLM

    class HarnessLM(Answers, TemplateLM):
        """TemplateLM turns the texts of log-likelihood requests into ids."""

    return HarnessLM(*args, **kwargs)


class Answers:
    """What any model of any method answers to the harness.

    Args:
        model, tokenizer: as interop.load and corpus.tokenizers.load_tokenizer give them.
        tau: where it stops pondering, 0 never.
        batch_tokens: how many tokens are scored at once.
        batch_size: how many sequences are decoded at once.

    Raises:
        UserError: in any method, a request that the model cannot answer.
    """

    def __init__(self, model, tokenizer, tau=1e-4, batch_tokens=4096, batch_size=16):
        super().__init__()
        self.model, self.tau, self.batch_tokens = model, tau, batch_tokens
        self.vocabulary, self.batch_size, self.count = tokenizer, batch_size, Count()

    @property
    def eot_token_id(self):
        return self.vocabulary.end_of_text

    @property
    def prefix_token_id(self):
        """What a text without a context begins with."""
        return [*self.vocabulary.begin, self.vocabulary.end_of_text][0]

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        begin = [] if add_special_tokens is False else self.vocabulary.begin
        return begin + self.vocabulary.encode(string)

    def text(self, ids):
        return self.vocabulary.decode(ids).decode("utf-8", "replace")

    def window(self, context, continuation):
        """Two lists of ids -> the Window that predicts the second, with what fits of the first."""
        room = self.model.config.block_size
        if len(continuation) > room:
            raise UserError(
                f"a task asks for {len(continuation)} tokens at once, and the model scores {room}: "
                "leave this task out, or take a model with a longer window"
            )
        context = context or [self.prefix_token_id]  # spaces have gone to the continuation
        ids = (context + continuation)[-room - 1 :]
        return Window(ids, len(ids) - len(continuation))

    @torch.no_grad()
    def answers(self, windows):
        """[(log p, greedy)] of what Windows predict."""
        model, found = self.model, [None] * len(windows)
        device = model.lm_head.weight.device
        for batch, x, y, lengths in batches(windows, self.batch_tokens, device):
            h, s, steps = states(model, x, self.tau, lengths)
            h_hat = model.integrate(h, s, steps if model.has_router else None)
            for row, i in enumerate(batch):
                part = windows[i].predictions
                logits, ids = upcast(model.lm_head(h_hat[row, part])), y[row, part]
                log_p = -F.cross_entropy(logits, ids, reduction="sum")
                found[i] = log_p.item(), (logits.argmax(-1) == ids).all().item()
                self.count.steps += steps[row, : lengths[row]].sum().item()
        self.count.tokens += sum(len(window.ids) - 1 for window in windows)
        return found

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        windows = [self.window(context, continuation) for _, context, continuation in requests]
        self.count.requests += len(requests)
        pairs = zip(windows, requests, strict=True)
        self.count.cut += sum(w.first < len(context) for w, (_, context, _) in pairs)
        return self.answers(windows)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows, of = [], []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            room = self.model.config.block_size
            for pair in get_rolling_token_windows(ids, self.prefix_token_id, room, context_len=1):
                windows.append(self.window(*make_disjoint_window(pair)))
                of.append(i)
        self.count.requests += len(requests)
        total = [0.0] * len(requests)
        for i, (log_p, _) in zip(of, self.answers(windows), strict=True):
            total[i] += log_p
        return total

    def generate_until(self, requests, disable_tqdm=False):
        from lm_eval.models.utils import normalize_gen_kwargs

        alike, texts = {}, [None] * len(requests)
        for i, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        for settings, members in alike.items():
            contexts = [requests[i].args[0] for i in members]
            kwargs = normalize_gen_kwargs(json.loads(settings))
            for i, text in zip(members, self.generate(contexts, **kwargs), strict=True):
                texts[i] = text
        return texts

    def generate(
        self, contexts, max_gen_toks, until=(), do_sample=False, temperature=0.0, top_k=None,
        top_p=None, num_beams=1,
    ):  # fmt: skip
        """The continuations of texts, each without the text of `until` that ended it."""
        from lm_eval.models.utils import postprocess_generated_text

        if num_beams != 1:
            raise UserError(f"the task asks for num_beams = {num_beams}, which are unknown here")
        window = self.model.config.block_size
        room = window - max_gen_toks if max_gen_toks < window else max(window // 2, 1)
        ids = [self.tok_encode(text) or [self.prefix_token_id] for text in contexts]
        self.count.requests += len(ids)
        self.count.cut += sum(len(one) > room for one in ids)
        ids = [one[-room:] for one in ids]
        generated, read = [[] for _ in ids], [[] for _ in ids]
        until = [end for end in until if end]

        def over(i, token):
            if token != self.eot_token_id:
                generated[i].append(token)
            text = self.text(generated[i])
            return any(end in text for end in until)

        choice = dict(temperature=temperature if do_sample else 0, top_k=top_k or None, top_p=top_p)
        choice["end"] = self.eot_token_id
        if serves(self.model):
            engine = Engine(self.model, min(self.batch_size, len(ids)), tau=self.tau)
            deque(engine.stream(ids, max_gen_toks, seed=0, until=over, read=read, **choice), 0)
        else:
            for i, prompt in enumerate(ids):
                choice |= dict(tau=self.tau, seed=i, read=read[i])
                for token, _ in stream(self.model, prompt, max_gen_toks, **choice):
                    if over(i, token):
                        break
        self.count.tokens += sum(map(len, read))
        self.count.steps += sum(map(sum, read))
        return [postprocess_generated_text(self.text(one), until, None) for one in generated]
