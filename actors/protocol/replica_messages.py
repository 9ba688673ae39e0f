"""The messages to and from replicas (`clients.py`) that are more than a text or a number.

A message travels field by field, so both sides must run the same `VERSION` (`rpc/codec.py`), which covers these, the
router's (`router_messages.py`) and the stores' (`store_messages.py`). Tokens go from a replica straight to the
*consumer* (the endpoint, or a driver with handles); the router sees only sizes and ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .speech_messages import SpeechInfo

IDLE_PRIORITY = -1_000_000
"""Sequences of this priority or less are computed only while no other sequence waits or has a place."""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """How many tokens of reasoning a sequence may draw, by the token ids of its model's markers.

    A block begins with `start` near the beginning of the answer, or has begun in the prompt (`inside`), and ends with
    `end`. With `again` further blocks may follow, and count too. `closing` is drawn once `tokens` were. `breaks` are
    tokens that end a line, where a block can end shortly before.
    """

    tokens: int
    start: list[int]
    end: list[int]
    closing: list[int]
    breaks: list[int] = field(default_factory=list)
    inside: bool = False
    again: bool = False


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one sequence draws its tokens, whatever else is in its batch.

    The order: `logit_bias` (pairs of a token and the addend of its logit) and the penalties change the logits,
    `temperature` divides them, then `top_k`, `top_p` and `min_p` leave tokens out, and noise decides among the rest.
    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off, as are `repetition_penalty` 1 (it counts
    prompt and answer) and `presence_penalty` and `frequency_penalty` 0 (they count the answer).

    `seed` is always set: the consumer draws one if the caller gave none, so that a sequence that fails over continues
    with the same noise. `choice` distinguishes sequences of one request and seed.

    End-of-sequence tokens and `stop_token_ids` end the sequence, and cannot be drawn before `min_tokens`; `ignore_eos`
    leaves the `stop_token_ids` in force.

    With `max_tokens` 0 the prompt is computed and its KV is cached, and no token is drawn.

    `logprobs` is None, or how many of the likeliest tokens are reported with each drawn one.

    `allowed_token_ids` are all that can be drawn, [] for any. `bad_words` are token ids of words that do not appear in
    the answer; one may if nothing else can be drawn. They come after penalties and bias, as if the model had no other
    tokens; `logprobs` are as without them. A sequence that has them has no `grammar`.

    `grammar` constrains the answer, "" for none: text that `model_files.grammar_compiler` compiles. Tokens that it
    excludes cannot be drawn; penalties and bias come before it, and `logprobs` are as without it. End-of-sequence
    tokens can be drawn when it is complete, and then end the sequence. With `ignore_eos` and before `min_tokens` they
    are drawn only where the grammar leaves nothing else.

    `thinking` limits reasoning; None for no limit. Its closing tokens come before everything else, except a grammar.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: list[tuple[int, float]] = field(default_factory=list)
    seed: int = 0
    choice: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = field(default_factory=list)
    logprobs: int | None = None
    grammar: str = ""
    allowed_token_ids: list[int] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    thinking: ThinkingBudget | None = None


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """A picture in a prompt, some frames of a video that are encoded together, or audio.

    Its span begins at the prompt's token `start`; `tokens` are the ids that the model gets there, where the prompt has
    media token ids (`media_ids`). `key` names the encoder's input. `grid` is (frames, rows, columns) of patches if
    positions depend on it, else empty. `pixels` are RGB, a byte a channel, of `width` x `height`, frame by frame; empty
    if no process holds them. If `audio_rate` is not 0, the medium is audio of so many samples a second: `pixels` has
    one element, its samples of one channel in float32, little-endian, and `width` and `height` are 0.
    """

    start: int
    tokens: list[int]
    key: bytes
    grid: list[int]
    width: int
    height: int
    pixels: list[bytes]
    video: bool = False
    audio_rate: int = 0


def request_of(sequence_id: str) -> str:
    """Returns the id of the request that a sequence belongs to: all before the last `/` of the sequence's id."""
    return sequence_id.rpartition("/")[0]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to generate.

    Attributes:
        prompt: token ids, and media token ids where a picture of `media` is.
        block_ids: of the prompt's whole blocks, in order; `root_id` is the parent of the first. Both are derived from
            `model_id`, which is b"" if unknown, and `scope`, as in `block_ids.root_id`.
        generated: how many of the prompt's last tokens were generated for this request on a replica that was lost;
            sampling continues at that position.
        choices: how many requests with this prompt come together, as for a caller's `n`. The prompt is prefilled once.
        pull_from, pull_tokens: KV of this many of the prompt's first tokens is pulled from this node before prefill, as
            far as it is missing on the replica's node; "" for none.
        pull_wait_s: 0 if that node has the KV. Otherwise the KV is being computed there, and the sequence waits at most
            this long for it. The sequence is accepted before the wait; a later refusal becomes the error at its end.
        hands_on: another node waits for this sequence's KV: whole blocks are written to disk as soon as they are
            sealed.
        remembered_tokens: how many of the prompt's first tokens the agent had in earlier turns; 0 if unknown.
        lasting_tokens: with how many of the prompt's first tokens every later prompt of the conversation begins,
            whatever the answer is and whatever the template drops of it; at most up to where the answer begins; 0 if
            unknown.
        lasting_saved: whether the KV up to there is written to disk in any case, because later prompts diverge there.
        reusable: if False, no other request can find this one's KV, so none is cached when it ends.
        tenant, flow: tenants take turns, and within a tenant its flows.
        memory_bytes_max: the limit of the tenant's unused KV in the replica's memory, in bytes; None for no limit.
        disk_bytes_max: the limit of its agents' transcripts and KV on each node's disk, in bytes; None for no limit.
        adapter: the digest of the adapter of `model` that answers, b"" for none. `model_id` includes it.
    """

    request_id: str
    consumer: str
    model: str
    agent: str
    prompt: list[int]
    block_ids: list[bytes]
    root_id: bytes
    sampling: Sampling
    priority: int = 0
    deadline_s: float = 600.0
    generated: int = 0
    choices: int = 1
    pull_from: str = ""
    pull_tokens: int = 0
    pull_wait_s: float = 0.0
    hands_on: bool = False
    media: list[MediaSpan] = field(default_factory=list)
    remembered_tokens: int = 0
    lasting_tokens: int = 0
    lasting_saved: bool = False
    reusable: bool = True
    model_id: bytes = b""
    scope: str = ""
    tenant: str = ""
    flow: str = ""
    memory_bytes_max: int | None = None
    disk_bytes_max: int | None = None
    adapter: bytes = b""

    @property
    def disk_limits(self) -> dict[str, int | None]:
        """The tenant's limit, as `store_messages.Limits`."""
        return {self.tenant: self.disk_bytes_max}


TokenLogprobs = tuple[float, list[tuple[int, float]]]
"""The natural logarithm of a drawn token's probability, and (token, logarithm) of the likeliest ones, best first; of
the model's own distribution, before bias, penalties, temperature and filters."""


# Not frozen: one is made for every token, and that takes a third of the time then. Nobody changes it.
@dataclass(slots=True)
class SequenceUpdate:
    """What one sequence produced since the last frame.

    `finish` is None while the sequence runs, then `stop`, `length`, `abort` or `error`. `cached_tokens` comes with the
    first update, and `disk_tokens` with it: how many of them were read from the node's disk, also those that were
    pulled there from another node. `queued_s` comes with it too: for how long the sequence waited for a place in the
    batch. `prefill_s` comes with the first token, or with the end of a sequence that draws none: the time since it got
    its place, which includes reading KV back. `error` is `SatchelError.to_wire()` if `finish` is `error`. `logprobs`
    has an entry for every token if the request asked for them.
    """

    request_id: str
    tokens: list[int]
    finish: str | None = None
    cached_tokens: int | None = None
    error: dict[str, Any] | None = None
    logprobs: list[TokenLogprobs] | None = None
    disk_tokens: int = 0
    queued_s: float | None = None
    prefill_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReplicaProgress:
    """What a replica does until it is ready, and the fraction done, None if unknown."""

    what: str
    fraction: float | None
    ready: bool


@dataclass(frozen=True, slots=True)
class EmbeddingInfo:
    """How a model embeds texts. `refusal` says why it does not, "" if it does.

    `pooling` says how a text's hidden states make its embedding: `last`, `mean` or `cls` (the first). `normalized` says
    whether embeddings have length 1, and `stated` whether the model's own files say all this.
    """

    dimensions: int = 0
    pooling: str = ""
    normalized: bool = True
    stated: bool = False
    refusal: str = "it is not known whether it embeds texts"


IMAGE_SIDE_MAX = 2048
"""No image is wider or higher, in pixels, whatever its family can do: memory grows with the square."""

IMAGE_STEPS_MAX = 250
"""The most steps of an image."""


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """How a model makes images. `family` is mlx-vlm's name for its kind, "" if it makes none.

    `steps` and `guidance` are the model's own, and `edit_steps` and `edit_guidance` those of edits. `generates` and
    `edits` say what it does. Widths and heights are multiples of `multiple` from `side_min` to `side_max`, in pixels.
    `steps_min` and `edit_steps_min` are the fewest steps.
    """

    family: str = ""
    steps: int = 0
    guidance: float = 0.0
    generates: bool = False
    edits: bool = False
    edit_steps: int = 0
    edit_guidance: float = 0.0
    multiple: int = 16
    side_min: int = 16
    side_max: int = IMAGE_SIDE_MAX
    steps_min: int = 1
    edit_steps_min: int = 1


@dataclass(frozen=True, slots=True)
class StageInfo:
    """Layers [start, stop) of a divided model, and their node."""

    node: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A LoRA adapter that requests may name. `digest` is derived from `files`, a table by name."""

    name: str
    digest: bytes
    files: dict[str, str]
    rank: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as a replica has loaded it. `model_id` is derived from `files` and `computing`, `files_id` from `files`
    alone, each a table by name. `layers` describes for people what each kind of layer caches. `created` is Unix time.
    `kv` is the policy for cached KV, and `kv_why` the reason. `pictures` says whether it takes pictures and videos,
    `blind` why a vision model does not take them, and `stills` why it takes a video's frames as single pictures.
    `audio` says whether it takes audio, and `no_audio` why a model with an encoder of audio does not; empty if it does,
    and for other models.
    `notes` say in sentences what is not served as requested. `proving` says what the self-test still checks while the
    model is served in plain mode, and `proving_since` is when that began, Unix time; "" and 0 if nothing is checked.
    `stages` are those of a divided model; then `layers` describes the last one's. `joins` is how many layers the whole
    model has if KV of any of them can be cut out and joined, else 0.

    `images` says how it makes images, and `speech` what it does with speech; then it generates no text in chats.

    `adapters` are those that requests may name. `with_adapter` describes the model with one of them, as a model of its
    own: then `parent` is the name of the model, and `adapter` the adapter's digest."""

    replica: str
    node: str
    name: str
    model_id: bytes
    files_id: bytes
    files: dict[str, str]
    computing: dict[str, str]
    folder: str
    trust_remote_code: bool
    context_tokens: int
    vocabulary_size: int
    dtype: str
    weights: str
    kv: str
    layers: str
    created: int
    pid: int
    kv_why: str = ""
    pictures: bool = False
    blind: str = ""
    stills: str = ""
    audio: bool = False
    no_audio: str = ""
    embedding: EmbeddingInfo = field(default_factory=EmbeddingInfo)
    notes: list[str] = field(default_factory=list)
    proving: str = ""
    proving_since: float = 0.0
    stages: list[StageInfo] = field(default_factory=list)
    joins: int = 0
    adapters: list[AdapterInfo] = field(default_factory=list)
    parent: str = ""
    adapter: bytes = b""
    images: ImageInfo = field(default_factory=ImageInfo)
    speech: SpeechInfo = field(default_factory=SpeechInfo)

    @property
    def makes_text(self) -> bool:
        """Whether it generates text."""
        return not (self.images.family or self.speech.family)

    @property
    def replicas_of(self) -> str:
        """The name of the model whose replicas compute it."""
        return self.parent or self.name


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """A replica's current figures. `answers` is False if it did not reply in time, is loading or is stuck.

    `requests_total` counts accepted requests. Their prompts count once they have a place in the batch:
    `prompt_tokens_total`, those of them whose KV was reused (`cached_tokens_total`), and those that memory had
    (`hot_tokens_total`). `kv_tokens` is what the KV of sequences with a place costs, out of `kv_tokens_max`, which it
    may cost now. `drafted_tokens_total` are in `drafts_total` drafts; `accepted_tokens_total` of them were right. The
    two with `model_` are those that a small model drafted.

    A block has a slot of the pool in each group of equal layers. `slots_running` are held by sequences and by KV that
    waits to be written, `slots_kept` by cached prefixes that no sequence uses. `memory_bytes` is all that the replica
    holds besides its model, out of `memory_bytes_max`. `claimed_bytes` is what its model needs (weights, and temporary
    memory), out of `claimable_bytes` for all replicas of its node, their KV included. `has_kv`: whether it needs KV
    besides; a model that makes images does not. `split_requests_total` counts the sequences that another node
    prefilled, and `split_fallbacks_total` those of them for which some KV did not arrive.
    `prepared_tokens_total` were prefilled before a request needed them; requests used `prepared_tokens_used_total` of
    them, and `prepared_tokens_wasted_total` were evicted before that.
    `proving`, `proving_since` and `stages` as in `ModelInfo`.
    """

    replica: str
    model: str
    answers: bool
    running: int = 0
    waiting: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    requests_total: int = 0
    prefix_blocks: int = 0
    prefix_bytes: int = 0
    prefix_hits_total: int = 0
    prefix_misses_total: int = 0
    hot_tokens_total: int = 0
    preemptions_total: int = 0
    drafts_total: int = 0
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0
    model_drafted_tokens_total: int = 0
    model_accepted_tokens_total: int = 0
    kv_tokens: int = 0
    kv_tokens_max: int = 0
    unwritten_bytes: int = 0
    written_blocks_total: int = 0
    written_bytes_total: int = 0
    unwritten_turns_total: int = 0
    restored_tokens_total: int = 0
    blocks_corrupt_total: int = 0
    split_requests_total: int = 0
    split_fallbacks_total: int = 0
    failed_checks_total: int = 0
    device_failures_total: int = 0
    prefill_token_j: float = 0.0
    decode_token_j: float = 0.0
    embedded_tokens_total: int = 0
    prepared_tokens_total: int = 0
    prepared_tokens_used_total: int = 0
    prepared_tokens_wasted_total: int = 0
    vision_cache_hits_total: int = 0
    vision_encodes_total: int = 0
    vision_bytes: int = 0
    slots_running: int = 0
    slots_kept: int = 0
    slots_free: int = 0
    memory_bytes: int = 0
    memory_bytes_max: int = 0
    claimed_bytes: int = 0
    claimable_bytes: int = 0
    has_kv: bool = True
    node: str = ""
    model_id: str = ""
    computing: dict[str, str] = field(default_factory=dict)
    """How it computes, by setting; see `identity.computing`."""
    decoding: str = ""
    """How decode steps read KV, and why not faster; see `decode_ways.py`."""
    multiplying: str = ""
    proving: str = ""
    proving_since: float = 0.0
    """The library that multiplies matrices on a CPU, and why not a faster one; see `blas.py`. Empty for a GPU."""
    folder: str = ""
    """The model's, on the replica's node."""
    weights_bytes: int = 0
    """Of the model's weights as stored."""
    idle_s: float = 0.0
    """For how long it has had no sequence and no text."""
    stages: list[StageInfo] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)
    """The names of its adapters."""
    images_total: int = 0
    """The images that it has made."""
    image_steps_total: int = 0
    """The steps of images that it has computed."""
    transcripts_total: int = 0
    transcribed_s_total: float = 0.0
    """The transcripts that it has made, and the seconds of their audio."""
    speeches_total: int = 0
    spoken_s_total: float = 0.0
    """The texts that it has spoken, and the seconds of their audio."""

    @property
    def kv_usage(self) -> float:
        """The part of `kv_tokens_max` that is used, at most 1."""
        return min(1.0, self.kv_tokens / self.kv_tokens_max) if self.kv_tokens_max else float(self.kv_tokens > 0)


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    """Asks for a vector for each text: from its hidden states, or from the logits after it; or for the logprobs of its
    tokens.

    Attributes:
        texts: token ids of each.
        skipped: how many of each text's first tokens are left out of the mean and of the first token, such as those of
            a prompt that the model was trained with; [] for none.
        score: [] for embeddings. [token] asks for the logit of a token after the text, [token, other] for the
            difference of two: vectors of one dimension.
        tenant, flow: as in `GenerateRequest`.
        logprobs: None for vectors. A number asks for each token's logprob behind those before it, and for so many of
            the likeliest tokens in its place.
    """

    request_id: str
    model: str
    texts: list[list[int]]
    skipped: list[int] = field(default_factory=list)
    score: list[int] = field(default_factory=list)
    priority: int = 0
    deadline_s: float = 600.0
    tenant: str = ""
    flow: str = ""
    logprobs: int | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens of all texts."""
        return sum(map(len, self.texts))


@dataclass(frozen=True, slots=True)
class PooledTexts:
    """The vectors of a `PoolingRequest`, one after the other in its order: float32, little-endian.

    If it asks for logprobs, each token of a text but the first has a vector: its logprob, the ids of the likeliest
    tokens, best first, and their logprobs.
    """

    dimensions: int
    vectors: bytes


IMAGE_PATCH = 16
"""The side of a patch of an image, in pixels. Models that make images have about one token a patch."""


def image_tokens(width: int, height: int) -> int:
    """Returns the number of patches of an image of `width` x `height` pixels, at least 1."""
    return max(1, width // IMAGE_PATCH) * max(1, height // IMAGE_PATCH)


@dataclass(frozen=True, slots=True)
class Pixels:
    """An image: `data` has a byte a channel, row by row; `channels` is 3 for RGB and 4 for RGBA."""

    width: int
    height: int
    data: bytes
    channels: int = 3


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """Asks for one image.

    Attributes:
        width, height: in pixels.
        seed: of its noise. The same request with the same seed gives the same image on the same device.
        steps, guidance: None for the model's own.
        partial_images: how many partial images it sends before the last one.
        images: what is edited; [] generates an image from the prompt alone.
        tenant, flow: as in `GenerateRequest`.
    """

    request_id: str
    model: str
    prompt: str
    width: int
    height: int
    seed: int
    steps: int | None = None
    guidance: float | None = None
    partial_images: int = 0
    images: list[Pixels] = field(default_factory=list)
    priority: int = 0
    deadline_s: float = 600.0
    tenant: str = ""
    flow: str = ""

    @property
    def tokens(self) -> int:
        """What it costs: the image's patches, once for each step."""
        return image_tokens(self.width, self.height) * (self.steps or 1)


def image_refusal(info: ImageInfo, request: ImageRequest, steps: int) -> tuple[str, str] | None:
    """Returns the field of a request for an image that its model does not take, and why; None if it takes all.

    Args:
        steps: the request's, or the model's own.
    """
    name = repr(request.model)
    if request.images and not info.edits:
        return "model", f"the model {name} edits no images: POST /v1/images/generations serves it"
    if not request.images and not info.generates:
        return "model", f"the model {name} only edits images: POST /v1/images/edits serves it"
    for side in (request.width, request.height):
        if side % info.multiple or not info.side_min <= side <= info.side_max:
            limits = f"multiples of {info.multiple} from {info.side_min} to {info.side_max}"
            size = f"{request.width}x{request.height}"
            return "size", f"size: {size} is not possible with {name}; width and height must be {limits}"
    fewest = info.edit_steps_min if request.images else info.steps_min
    if not fewest <= steps <= IMAGE_STEPS_MAX:
        return "steps", f"steps: {fewest} to {IMAGE_STEPS_MAX} are possible with {name}"
    return None


@dataclass(frozen=True, slots=True)
class ImageUpdate:
    """How far an image is.

    Attributes:
        number: of the update, from 1.
        step: how many of about `steps` steps are computed; -1 while the request waits in the queue. Some families
            compute fewer steps than they are asked for.
        partial: the partial images that are new, each the image as it is after a step.
        image: the image, with the last update.
        prompt_tokens: of the prompt, with the last update.
        error: as in `SequenceUpdate`, with the last update of an image that failed.
    """

    number: int
    step: int
    steps: int
    partial: list[Pixels] = field(default_factory=list)
    image: Pixels | None = None
    prompt_tokens: int = 0
    error: dict[str, Any] | None = None

    @property
    def is_last(self) -> bool:
        return self.image is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class KVSelection:
    """Blocks of one chain, and ids of image embeddings. If the chain is shorter than a block, `first` has its packed
    tokens, which follow `root`. What was prepared for `agent` belongs to it too, "" for nothing."""

    root: bytes
    block_ids: list[bytes]
    first: bytes
    embeddings: list[bytes] = field(default_factory=list)
    agent: str = ""
