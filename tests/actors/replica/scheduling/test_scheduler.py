"""The scheduler, driven without a model: every sequence ends once, within the limits, whatever happens around it."""

from __future__ import annotations

from satchel.actors.protocol.block_ids import BLOCK_TOKENS
from satchel.actors.protocol.replica_messages import IDLE_PRIORITY
from satchel.actors.replica.scheduling.prefill_budget import TOKENS_MIN
from satchel.actors.replica.scheduling.scheduler import Limits, PrefillChunk, Scheduler
from satchel.actors.replica.scheduling.sequence import ScheduledSequence, SequenceState

LIMITS = Limits(sequences_max=4, queue_requests_max=6, prefill_chunk_tokens=256, kv_tokens_max=6000)


def drive(scheduler: Scheduler, now: float = 0.0) -> tuple[list[str], list[str]]:
    """One engine turn with a model that computes nothing. Returns (sequences decoded, sequences that left in the
    plan)."""
    plan = scheduler.plan(now)
    budget = scheduler.limits.prefill_chunk_tokens
    while True:
        while (admitted := scheduler.admit()) is not None:
            scheduler.reused(admitted, 0)
        chunk = scheduler.next_chunk(budget, scheduler.limits.prefill_chunk_tokens)
        if chunk is None:
            break
        assert 0 < chunk.stop - chunk.start <= budget
        budget -= chunk.stop - chunk.start
        scheduler.prefilled(chunk)
    scheduler.check()
    decoded = scheduler.decoding()
    for request_id in decoded:
        scheduler.decoded(request_id)
        sequence = scheduler.sequence(request_id)
        assert sequence is not None
        if sequence.generated >= sequence.max_tokens:
            scheduler.finish(request_id)
    return decoded, plan.expired + plan.cut


def test_sequences_join_and_leave_at_every_token():
    scheduler = Scheduler(LIMITS)
    scheduler.add(ScheduledSequence("long", prompt=10, max_tokens=6))
    assert drive(scheduler)[0] == ["long"]
    scheduler.add(ScheduledSequence("short", prompt=10, max_tokens=2))
    assert [drive(scheduler)[0] for _ in range(4)] == [["long", "short"], ["long", "short"], ["long"], ["long"]]


def test_a_long_prompt_does_not_stop_running_sequences():
    """While 3,000 tokens are prefilled in chunks, the running sequence decodes once after every chunk."""
    scheduler = Scheduler(LIMITS)
    scheduler.add(ScheduledSequence("running", prompt=1, max_tokens=100))
    drive(scheduler)
    scheduler.add(ScheduledSequence("long", prompt=2900, max_tokens=5))
    turns = 0
    while (sequence := scheduler.sequence("long")) is not None and sequence.state is not SequenceState.RUNNING:
        assert "running" in drive(scheduler)[0]
        turns += 1
    assert turns == -(-2900 // LIMITS.prefill_chunk_tokens)


def test_first_come_first_served_within_a_priority():
    scheduler = Scheduler(Limits(1, 10, 256, 6000))
    for name, priority in (("a", 0), ("b", 0), ("urgent", 5), ("c", 0)):
        scheduler.add(ScheduledSequence(name, prompt=5, max_tokens=1, priority=priority))
    order = []
    while scheduler.running or scheduler.waiting:
        order += drive(scheduler)[0]
    assert order == ["urgent", "a", "b", "c"]


def test_a_full_queue_refuses_and_has_room_again_later():
    scheduler = Scheduler(LIMITS)
    for index in range(LIMITS.sequences_max + LIMITS.queue_requests_max):
        assert scheduler.refusal(5, flow=str(index)) is None
        scheduler.add(ScheduledSequence(str(index), prompt=5, max_tokens=3, flow=str(index)))
    assert scheduler.refusal(5) == "full"
    while scheduler.waiting:
        drive(scheduler)
    assert scheduler.refusal(5) is None


def test_sequences_that_are_on_their_way_take_places_of_the_queue():
    """Accepted sequences count as if they were in the queue."""
    scheduler = Scheduler(LIMITS)
    most = LIMITS.sequences_max + LIMITS.queue_requests_max
    assert scheduler.refusal(5, coming=most - 1) is None and scheduler.refusal(5, coming=most) == "full"
    for index in range(most - 2):
        scheduler.add(ScheduledSequence(str(index), prompt=5, max_tokens=3, flow=str(index)))
    assert scheduler.refusal(5, coming=1) is None and scheduler.refusal(5, coming=2) == "full"
    drive(scheduler)
    assert scheduler.running == LIMITS.sequences_max
    assert scheduler.refusal(5, coming=1) is None and scheduler.refusal(5, coming=2) == "full"


def test_what_is_known_of_a_waiting_prompt_is_no_work_to_come():
    scheduler = Scheduler(LIMITS)
    scheduler.add(ScheduledSequence("some", prompt=1000, max_tokens=1, known=700))
    scheduler.add(ScheduledSequence("all", prompt=500, max_tokens=1, known=501))
    scheduler.add(ScheduledSequence("none", prompt=40, max_tokens=1))
    assert scheduler.pending_tokens == 300 + 0 + 40
    assert scheduler.admit() == "some"
    assert scheduler.pending_tokens == 1000 + 40, "until it says what it could reuse"
    scheduler.reused("some", 600)
    assert scheduler.pending_tokens == 400 + 40


def test_a_prompt_beyond_memory_is_refused_for_good():
    assert Scheduler(LIMITS).refusal(LIMITS.kv_tokens_max) == "too_long"


def test_a_lone_sequence_that_fills_memory_is_cut_not_preempted():
    scheduler = Scheduler(Limits(4, 4, 256, 1000))
    scheduler.add(ScheduledSequence("big", prompt=900, max_tokens=10_000))
    left: list[str] = []
    for _ in range(200):
        left += drive(scheduler)[1]
        if left:
            break
    assert left == ["big"]
    assert scheduler.sequence("big") is None


def test_a_failed_batch_runs_again_alone_and_only_the_culprit_ends():
    scheduler = Scheduler(LIMITS)
    for name in ("good", "bad", "fine"):
        scheduler.add(ScheduledSequence(name, prompt=3, max_tokens=50))
    drive(scheduler)
    lost: list[str] = []
    for _ in range(30):
        scheduler.plan(0.0)
        if admitted := scheduler.admit():
            scheduler.reused(admitted, 0)
            while chunk := scheduler.next_chunk(256):
                scheduler.prefilled(chunk)
        batch = scheduler.decoding()
        if "bad" in batch:
            ended = scheduler.batch_failed()
            for request_id in ended:
                scheduler.finish(request_id)
            lost += ended
        else:
            for request_id in batch:
                scheduler.decoded(request_id)
        scheduler.check()
    assert lost == ["bad"]
    assert set(scheduler.decoding()) == {"good", "fine"}


def test_suspects_join_one_at_a_time():
    """No sequence, suspect or not, joins until a step has cleared the one before."""
    scheduler = Scheduler(LIMITS)
    for name in ("a", "b"):
        scheduler.add(ScheduledSequence(name, prompt=0, max_tokens=9))
        assert scheduler.admit() == name
        scheduler.reused(name, 0)
    assert scheduler.batch_failed() == []
    scheduler.add(ScheduledSequence("fresh", prompt=0, max_tokens=9))
    for before, name in ((None, "a"), ("a", "b"), ("b", "fresh")):
        if before is not None:
            assert scheduler.admit() is None
            scheduler.decoded(before)
        assert scheduler.admit() == name
        scheduler.reused(name, 0)


def test_a_suspect_joins_only_sequences_that_a_step_has_cleared():
    """A sequence that breaks its first step is named, not the innocent suspect that could have joined with it."""
    scheduler = Scheduler(LIMITS)
    for name in ("innocent", "also"):
        scheduler.add(ScheduledSequence(name, prompt=300, max_tokens=9))
    while len(scheduler.decoding()) < 2:
        drive(scheduler)
    assert scheduler.batch_failed() == []
    scheduler.add(ScheduledSequence("urgent", prompt=300, max_tokens=9, priority=1))
    scheduler.plan(0.0)
    assert scheduler.admit() == "urgent"
    scheduler.reused("urgent", 300)
    assert scheduler.decoding() == ["urgent"]
    assert scheduler.admit() is None, "urgent has not been through a step"
    assert scheduler.batch_failed() == ["urgent"]


def admit_all(scheduler: Scheduler) -> list[str]:
    """Everything that may start now; nothing of it is known."""
    admitted = []
    while (name := scheduler.admit()) is not None:
        scheduler.reused(name, 0)
        admitted.append(name)
    scheduler.check()
    return admitted


def chunks(scheduler: Scheduler, budget: int, count: int) -> list[str]:
    """Who gets the next `count` chunks."""
    names = []
    for _ in range(count):
        if (chunk := scheduler.next_chunk(budget)) is None:
            break
        scheduler.prefilled(chunk)
        names.append(chunk.request_id)
    return names


def test_a_short_prompt_and_the_oldest_take_turns():
    """The oldest has every second chunk; of the others the one with the least left is served."""
    scheduler = Scheduler(Limits(4, 6, 256, 100_000))
    for name, prompt in (("oldest", 2000), ("middle", 700), ("short", 500)):
        scheduler.add(ScheduledSequence(name, prompt, max_tokens=1))
    assert admit_all(scheduler) == ["oldest", "middle", "short"]
    turns = chunks(scheduler, 256, 20)
    assert turns[:10] == ["short", "oldest"] * 2 + ["middle", "oldest"] * 3
    assert turns[10:] == ["oldest"] * 3


def test_a_sequence_that_was_sent_back_is_owed_no_turn():
    """It starts again, and so does the order of turns: the short prompt that came with it is served first again."""
    scheduler = Scheduler(Limits(2, 6, 256, 100_000))
    for name, prompt in (("oldest", 2000), ("short", 1000)):
        scheduler.add(ScheduledSequence(name, prompt, max_tokens=1))
    admit_all(scheduler)
    assert chunks(scheduler, 256, 1) == ["short"]
    for name in ("urgent", "urgent too"):
        scheduler.add(ScheduledSequence(name, 10, max_tokens=1, priority=1))
    assert scheduler.plan(0.0).preempted == ["short"]
    assert scheduler.admit() == "urgent"
    scheduler.reused("urgent", 0)
    assert scheduler.plan(0.0).preempted == ["oldest"]
    assert admit_all(scheduler) == ["urgent too"]
    for name in ("urgent", "urgent too"):
        scheduler.finish(name)
    assert admit_all(scheduler) == ["oldest", "short"]
    assert chunks(scheduler, 256, 3) == ["short", "oldest", "short"]


def test_an_urgent_prompt_is_prefilled_before_all_others():
    scheduler = Scheduler(LIMITS)
    scheduler.add(ScheduledSequence("calm", prompt=300, max_tokens=1))
    assert admit_all(scheduler) == ["calm"]
    scheduler.add(ScheduledSequence("urgent", prompt=1000, max_tokens=1, priority=1))
    assert admit_all(scheduler) == ["urgent"]
    assert chunks(scheduler, 256, 9) == ["urgent"] * 4 + ["calm"] * 2


def test_so_many_prompts_share_the_prefill_and_no_more():
    for most in (1, 3):
        scheduler = Scheduler(Limits(8, 8, 256, 100_000, prefill_sequences_max=most))
        for index in range(6):
            scheduler.add(ScheduledSequence(str(index), prompt=500, max_tokens=1))
        assert admit_all(scheduler) == [str(index) for index in range(most)]


def stops_of(sequence: ScheduledSequence, reused: int, budgets: list[int], size: int = 512) -> list[int]:
    """Where the chunks of a lone sequence end that has `reused` tokens, with these budgets one after the other."""
    scheduler = Scheduler(Limits(1, 1, size, 100_000))
    scheduler.add(sequence)
    assert scheduler.admit() == sequence.request_id
    scheduler.reused(sequence.request_id, reused)
    stops = []
    for budget in budgets:
        chunk = scheduler.next_chunk(budget)
        assert chunk is not None
        assert chunk.stop - chunk.start <= budget
        scheduler.prefilled(chunk)
        stops.append(chunk.stop)
    return stops


def test_chunks_end_at_borders_and_within_the_budget():
    """Whatever a sequence begins with, its chunks end at multiples of the chunk size, at grains, or with the
    sequence."""
    assert stops_of(ScheduledSequence("r", 1400, 1), 299, [512, 512, 100, 512]) == [512, 1024, 1088, 1400]


def test_chunks_after_a_reused_prefix_end_where_blocks_do():
    """The first one is shorter for it; where it would be shorter than half, only every second one ends there."""
    assert stops_of(ScheduledSequence("r", 2000, 1), 299, [256, 256, 256], 2048) == [512, 768, 1024]
    assert stops_of(ScheduledSequence("r", 2000, 1), 511, [256, 256, 256], 2048) == [640, 768, 1024]
    assert stops_of(ScheduledSequence("r", 2000, 1), 299, [64, 64, 64], 2048) == [352, 384, 448]


def test_what_a_short_prompt_leaves_of_a_budget_moves_no_chunk_of_a_long_one():
    """A small call costs nearly a chunk's, and one that ends elsewhere shifts all later chunks off the blocks."""
    scheduler = Scheduler(Limits(4, 4, 2048, 100_000))
    for name, prompt in (("long", 2000), ("short", 155)):
        scheduler.add(ScheduledSequence(name, prompt, 1))
    admit_all(scheduler)
    assert scheduler.next_chunk(256) == PrefillChunk("short", 0, 155)
    scheduler.prefilled(PrefillChunk("short", 0, 155))
    assert scheduler.next_chunk(101, 256) is None
    assert scheduler.next_chunk(TOKENS_MIN - 1) is None
    assert scheduler.next_chunk(TOKENS_MIN) == PrefillChunk("long", 0, TOKENS_MIN)
    scheduler.prefilled(PrefillChunk("long", 0, 200))
    assert scheduler.next_chunk(101, 256) is None, "56 tokens to the block's end"
    scheduler.prefilled(PrefillChunk("long", 200, 170 + BLOCK_TOKENS))
    assert scheduler.next_chunk(101, 256) == PrefillChunk("long", 426, 512)


def test_a_prompt_that_a_budget_completes_is_not_cut_at_a_border():
    """Each chunk is a call. Only where the states of recurrent layers are saved at borders, chunks end there."""
    for stops, expected in ((False, [512, 1100]), (True, [512, 1024, 1100])):
        scheduler = Scheduler(Limits(1, 1, 1024, 100_000, stops_at_borders=stops))
        scheduler.add(ScheduledSequence("r", 1100, 1))
        assert scheduler.admit() == "r"
        scheduler.reused("r", 100)
        ends = []
        for budget in (512, 1024, 1024)[: len(expected)]:
            chunk = scheduler.next_chunk(budget)
            assert chunk is not None
            scheduler.prefilled(chunk)
            ends.append(chunk.stop)
        assert ends == expected


def test_the_rest_of_a_budget_cuts_no_prompt_that_the_next_step_completes():
    scheduler = Scheduler(Limits(4, 4, 2048, 100_000))
    for name, prompt in (("a", 5700), ("b", 5800)):
        scheduler.add(ScheduledSequence(name, prompt, 1))
        assert scheduler.admit() == name
        scheduler.reused(name, 4500)
    assert scheduler.next_chunk(2048, 2048) == PrefillChunk("a", 4500, 5700)
    scheduler.prefilled(PrefillChunk("a", 4500, 5700))
    assert scheduler.next_chunk(848, 2048) is None
    assert scheduler.next_chunk(2048, 2048) == PrefillChunk("b", 4500, 5800)


def test_what_the_oldest_cannot_use_is_for_prompts_that_end():
    """Short prompts that come together are prefilled together, and the next step begins with the oldest."""
    scheduler = Scheduler(Limits(8, 8, 2048, 100_000, prefill_sequences_max=8))
    for name, prompt in (("oldest", 2000), ("a", 20), ("b", 30), ("c", 40), ("d", 1000)):
        scheduler.add(ScheduledSequence(name, prompt, 1))
    admit_all(scheduler)
    budget, done = 256, []
    while chunk := scheduler.next_chunk(budget, 256):
        scheduler.prefilled(chunk)
        budget -= chunk.stop - chunk.start
        done.append(chunk.request_id)
    assert done == ["a", "b", "c"]
    assert chunks(scheduler, 256, 3) == ["oldest", "d", "oldest"]


KEYS = tuple(bytes([index]) for index in range(8))


def test_a_sequence_waits_for_the_blocks_it_shares_and_no_longer():
    """Others go ahead meanwhile; from where the prompts part, both are prefilled together."""
    scheduler = Scheduler(LIMITS)
    scheduler.add(ScheduledSequence("first", 1300, 1, keys=KEYS[:5]))
    scheduler.add(ScheduledSequence("second", 1000, 1, keys=(*KEYS[:2], b"other")))
    scheduler.add(ScheduledSequence("stranger", 1000, 1, keys=(b"stranger",)))
    assert admit_all(scheduler) == ["first", "stranger"]
    scheduler.finish("stranger")
    assert chunks(scheduler, 256, 1) == ["first"]
    assert admit_all(scheduler) == []
    assert chunks(scheduler, 256, 1) == ["first"]
    assert admit_all(scheduler) == ["second"]


def test_a_block_that_cannot_be_reused_is_not_waited_for():
    """A prompt's last token is computed anyway, so a last block that it fills is shared by nobody."""
    for prompts in ((255, 700), (700, 255)):
        scheduler = Scheduler(LIMITS)
        for name, prompt in zip(("first", "second"), prompts, strict=True):
            scheduler.add(ScheduledSequence(name, prompt, 1, keys=KEYS[: (prompt + 1) // 256]))
        assert admit_all(scheduler) == ["first", "second"]


def test_twins_are_prefilled_once():
    """Sequences of one whole prompt wait for the first to be ready; where it leaves, the next takes over."""
    scheduler = Scheduler(LIMITS)
    for name in "abc":
        scheduler.add(ScheduledSequence(name, 100, 5, twin=b"t"))
    assert admit_all(scheduler) == ["a"]
    scheduler.finish("a")
    assert admit_all(scheduler) == ["b"]
    chunks(scheduler, 256, 1)
    assert scheduler.admit() == "c"
    scheduler.reused("c", 100)
    assert scheduler.decoding() == ["b", "c"]


def test_an_urgent_sequence_does_not_wait_for_a_less_urgent_one_with_its_prompt():
    scheduler = Scheduler(LIMITS)
    scheduler.add(ScheduledSequence("calm", 600, 1, keys=KEYS[:2], twin=b"t"))
    assert admit_all(scheduler) == ["calm"]
    scheduler.add(ScheduledSequence("urgent", 600, 1, priority=1, keys=KEYS[:2], twin=b"t"))
    assert admit_all(scheduler) == ["urgent"]


def test_an_urgent_sequence_takes_the_place_of_the_youngest_least_urgent_one():
    """One place is enough, and the sequence that lost it goes on later with the tokens it has."""
    scheduler = Scheduler(LIMITS)
    for name, priority in (("old", 0), ("middle", 1), ("young", 0), ("other", 1)):
        scheduler.add(ScheduledSequence(name, 10, 50, priority))
    drive(scheduler)
    scheduler.add(ScheduledSequence("equal", 10, 5, 0))
    assert scheduler.plan(0.0).preempted == [], "equals wait"
    scheduler.add(ScheduledSequence("urgent", 10, 5, 1))
    assert scheduler.plan(0.0).preempted == ["young"]
    scheduler.check()
    assert scheduler.admit() == "urgent"
    scheduler.reused("urgent", 10)
    assert scheduler.plan(0.0).preempted == []
    young = scheduler.sequence("young")
    assert young is not None
    assert (young.prompt, young.max_tokens, young.state) == (11, 49, SequenceState.WAITING)
    assert scheduler.waiting == 2


def test_an_urgent_sequence_sends_back_as_few_as_make_room_for_it():
    """Memory for two sequences of its length: three of the four that run must go, the youngest first."""
    scheduler = Scheduler(Limits(8, 8, 256, 4000))
    for name in "abcd":
        scheduler.add(ScheduledSequence(name, 900, 50))
    while len(scheduler.decoding()) < 4:
        drive(scheduler)
    scheduler.add(ScheduledSequence("urgent", 1700, 100, priority=1))
    assert scheduler.plan(0.0).preempted == ["b", "c", "d"]
    assert admit_all(scheduler) == ["urgent"]


def test_nobody_is_sent_back_in_vain():
    """If even the places of all less urgent sequences are not enough, these keep them."""
    scheduler = Scheduler(Limits(8, 8, 256, 4000))
    scheduler.add(ScheduledSequence("urgent", 1200, 9, priority=1))
    scheduler.add(ScheduledSequence("calm", 10, 9))
    while len(scheduler.decoding()) < 2:
        drive(scheduler)
    scheduler.add(ScheduledSequence("big", 2200, 9, priority=1))
    assert scheduler.plan(0.0).preempted == []
    assert scheduler.admit() is None


def test_an_urgent_prompt_does_not_wait_for_a_turn_to_prefill():
    scheduler = Scheduler(Limits(8, 8, 256, 100_000, prefill_sequences_max=2))
    for name in ("old", "young"):
        scheduler.add(ScheduledSequence(name, 5000, 1))
    admit_all(scheduler)
    scheduler.add(ScheduledSequence("urgent", 5000, 1, priority=1))
    assert scheduler.plan(0.0).preempted == ["young"]
    assert admit_all(scheduler) == ["urgent"]


def test_free_memory_is_what_the_dense_batch_leaves():
    """Sequences x longest, with room for a step: a short sequence beside a long one takes as much as the long one."""
    scheduler = Scheduler(Limits(4, 4, 256, 1000))
    assert scheduler.free_tokens == 1000
    scheduler.add(ScheduledSequence("long", prompt=198, max_tokens=100))
    scheduler.add(ScheduledSequence("waiting", prompt=1, max_tokens=100))
    assert scheduler.free_tokens == 1000, "who waits holds nothing"
    admit_all(scheduler)
    assert scheduler.free_tokens == 1000 - 2 * 200


def test_a_reset_forgets_every_sequence_whatever_state_the_tables_are_in():
    scheduler = Scheduler(LIMITS)
    for index in range(9):
        scheduler.add(ScheduledSequence(f"before {index}", prompt=500, max_tokens=5, flow=str(index)))
    drive(scheduler)
    scheduler._running.clear()
    scheduler.reset()
    scheduler.check()
    assert (scheduler.running, scheduler.waiting, scheduler.pending_tokens) == (0, 0, 0)
    assert scheduler.limits is LIMITS and scheduler.free_tokens == LIMITS.kv_tokens_max
    assert scheduler.sequence("before 0") is None and scheduler.admit() is None
    scheduler.add(ScheduledSequence("before 0", prompt=5, max_tokens=2))
    assert drive(scheduler)[0] == ["before 0"]


def test_idle_sequences_are_computed_only_while_there_are_no_others():
    """They go back to the queue even if there is room for all, and go on with the tokens they have."""
    scheduler = Scheduler(LIMITS)
    for name in ("batch", "batch too"):
        scheduler.add(ScheduledSequence(name, 8, 50, priority=IDLE_PRIORITY))
    assert drive(scheduler)[0] == ["batch", "batch too"]
    scheduler.add(ScheduledSequence("person", 8, 3, priority=IDLE_PRIORITY + 1))
    assert scheduler.plan(0.0).preempted == ["batch", "batch too"]
    scheduler.check()
    assert [drive(scheduler)[0] for _ in range(4)] == [["person"]] * 3 + [["batch", "batch too"]]
    batch = scheduler.sequence("batch")
    assert batch is not None and (batch.prompt, batch.generated) == (9, 1)
    scheduler.add(ScheduledSequence("batch three", 8, 50, priority=IDLE_PRIORITY - 1))
    assert len(drive(scheduler)[0]) == 3, "among themselves they share the batch"
