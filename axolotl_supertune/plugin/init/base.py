"""What a YAML must say for a base model: its size, its longest input, its special tokens and its chat template."""

import json
import os
import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from axolotl.utils.dict import DictDefault

from ...method.adapter_files import CONFIG
from ...method.config_error import ConfigError
from .. import quantized_base
from ..axolotl_compat import chat_template_text
from ..plan.plan import meta_model
from ..validation import check_base

_CHATML = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Base:
    """A base model, without its weights.

    Attributes:
        name: a folder, or a model on the hub.
        parameters: how many weights it has.
        longest_input: tokens, as its config says; None if it does not.
        end_tokens: ids of the tokens that end a text, as its config says.
        tokenizer: a transformers tokenizer; None if it cannot be loaded.
        tokenizer_error: why it cannot be loaded.
    """

    name: str
    parameters: int
    longest_input: int | None
    end_tokens: tuple[int, ...]
    tokenizer: Any
    tokenizer_error: str = ""


@dataclass(frozen=True)
class Tokens:
    """Keys about special tokens and the chat template, each with its reason.

    Attributes:
        special: for `special_tokens`: (name, token, reason).
        chat_template: for `chat_template`; empty if the data is no chat.
        chat_reason: why that template.
        template: its Jinja text; None if the tokenizer is not here.
        turn_end: for `eot_tokens`: the token that ends an answer, where it is not the tokenizer's eos_token.
        warnings: sentences about what may be wrong with the tokenizer.
    """

    special: list[tuple[str, str, str]] = field(default_factory=list)
    chat_template: str = ""
    chat_reason: str = ""
    template: str | None = None
    turn_end: str = ""
    warnings: list[str] = field(default_factory=list)


def read_base(name: str) -> Base:
    """Read the config and the tokenizer of a base model, from a folder, the hub's cache or the hub.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: an adapter; a base of a library that is not supported; or a config that cannot be read or is not one
            of a causal language model.
    """
    from transformers import AutoTokenizer

    _check_folder(name)
    try:
        model, config = meta_model(DictDefault({"base_model": name}))
        quantized_base.check_base(name, config)
    except Exception as error:  # of many kinds: what libraries raise of a config with wrong values
        text = " ".join(str(error).removeprefix("base_model: ").split())
        if not isinstance(error, (ValueError, OSError)):
            text = f"its config.json cannot be used: {text}"
        remedy = ""
        if os.path.isdir(name):
            text = text.replace("; without the hub, name a folder that holds the model's config.json", "")
        elif "cannot be read" in text:
            remedy = (
                " The learning rate, the batch and the chat template depend on the base, so nothing is written without "
                f"it: download it (hf download {name}), or name its folder."
            )
        raise ValueError(f"--base {name}: {text}{remedy}") from error
    tokenizer, reason = None, ""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of many kinds: a missing file, a missing library, a broken JSON
        reason = (str(error) or type(error).__name__).splitlines()[0]
    text = config.get_text_config()
    ends = getattr(text, "eos_token_id", None)
    return Base(
        name,
        sum(parameter.numel() for parameter in model.parameters()),
        getattr(text, "max_position_embeddings", None),
        tuple(ends) if isinstance(ends, (list, tuple)) else () if ends is None else (ends,),
        tokenizer,
        reason,
    )


def _check_folder(name: str) -> None:
    if not name or os.path.isfile(name):
        what = "a file, no model" if name else "empty"
        raise ValueError(f"--base {name!r}: {what}. Name the folder of a model, or a model on the hub as OWNER/NAME.")
    try:
        check_base(name)
    except ConfigError as error:  # an adapter: say which base it is of
        try:
            base = json.loads((Path(name) / CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
        except (ValueError, KeyError, TypeError):
            base = None
        remedy = f"Name its base: --base {shlex.quote(str(base))}" if base else "Name the model that it was trained on"
        raise ValueError(
            f"--base {name}: an adapter and no model. {remedy}, or merge the adapter and name the merged model."
        ) from error


def choose_tokens(base: Base, is_chat: bool) -> Tokens:
    """The special tokens and the chat template that a training of this base needs."""
    if base.tokenizer is None:
        reason = "the tokenizer's own, if it has one, which could not be looked at"
        template = "tokenizer_default_fallback_alpaca" if is_chat else ""
        return Tokens(chat_template=template, chat_reason=reason if is_chat else "")
    tokens = Tokens(**_chat_template(base.tokenizer) if is_chat else {})
    end = _end_token(base, tokens)
    if tokens.chat_template == "tokenizer_default":
        tokens = _with_turn_end(tokens, base.tokenizer)
    if base.tokenizer.pad_token is None and end:
        tokens.special.append(("pad_token", end, "the tokenizer has none; padding is masked out"))
    return tokens


def _chat_template(tokenizer: Any) -> dict[str, Any]:
    if tokenizer.chat_template:
        return {
            "chat_template": "tokenizer_default",
            "chat_reason": "the base's own",
            "template": tokenizer.get_chat_template(),
        }
    if all(token in tokenizer.get_vocab() for token in _CHATML):
        return {
            "chat_template": "chatml",
            "chat_reason": f"the tokenizer has no chat template, but {' and '.join(_CHATML)}, which chatml needs",
            "template": chat_template_text("chatml"),
            "special": [("eos_token", _CHATML[1], "ends a turn in chatml")],
        }
    return {
        "chat_template": "alpaca",
        "chat_reason": "The base has no chat template. This one is plain text and needs no new tokens. Of the others "
        f"chatml needs {' and '.join(_CHATML)}, llama3 <|start_header_id|>, <|end_header_id|> and <|eot_id|>: a base "
        "that lacks them has to learn them (`tokens`, with lora_modules_to_save: [embed_tokens, lm_head]).",
        "template": chat_template_text("alpaca"),
    }


def _with_turn_end(tokens: Tokens, tokenizer: Any) -> Tokens:
    """Find what a chat template writes after an answer: Axolotl trains that token only if it knows it."""
    answer = "What is this?"
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(messages, chat_template=tokens.template, tokenize=False)
    except Exception:  # a template that refuses these messages refuses the records with a better message
        return tokens
    after = text.rpartition(answer)[2]
    if tokenizer.eos_token and tokenizer.eos_token in after:
        return tokens
    written = [token for token in _special_tokens(tokenizer) if token in after]
    if written:
        return replace(tokens, turn_end=min(written, key=after.index))
    tokens.warnings.append(
        "the base's chat template writes no token after an answer, so that the trained model does not learn to stop. "
        "Name another chat_template."
    )
    return tokens


def _special_tokens(tokenizer: Any) -> set[str]:
    added = (str(token) for token in tokenizer.added_tokens_decoder.values())
    return {token for token in (*added, *tokenizer.all_special_tokens) if token.strip()}


def _end_token(base: Base, tokens: Tokens) -> str | None:
    """The token that ends a text; adds to `tokens` where the tokenizer has none, or another one than the model."""
    tokenizer = base.tokenizer
    chosen = next((token for name, token, _ in tokens.special if name == "eos_token"), None)
    if chosen is not None:
        return chosen
    models = [tokenizer.convert_ids_to_tokens(end) for end in base.end_tokens]
    if tokenizer.eos_token is None:
        if models and models[0] is not None:
            tokens.special.append(("eos_token", models[0], "the tokenizer has none; this is the model's"))
            return models[0]
        tokens.warnings.append(
            "neither the tokenizer nor the config names a token that ends a text: set special_tokens: eos_token."
        )
    elif base.end_tokens and tokenizer.eos_token_id not in base.end_tokens:
        tokens.warnings.append(
            f"the tokenizer ends a text with {tokenizer.eos_token}, the model's config with {models[0]}. What is "
            "trained learns the tokenizer's; if that is the wrong one, set special_tokens: eos_token."
        )
    return tokenizer.eos_token
