"""All attacks, in the order in which they are made: those that end a part of the server come last."""

from __future__ import annotations

from . import bodies, connections, disk, engine, large, media, raw, schema, tenants
from .scene import Attack

ATTACKS = (
    Attack(
        "raw",
        "HTTP that is malformed, cut off, or rare",
        "an answer in the protocol's shape, or a closed connection",
        raw.run,
    ),
    Attack(
        "bodies",
        "drawn bodies with odd values on every route, eight at a time",
        "each is answered or refused by name",
        bodies.run,
    ),
    Attack(
        "schema",
        "Schemathesis: requests drawn from the server's own OpenAPI document",
        "no status from 500 on",
        schema.run,
    ),
    Attack(
        "media",
        "pictures and films with changed bytes",
        "shown, or refused with the place in the message",
        media.run,
    ),
    Attack(
        "large",
        "bodies of 32 MiB: one text, and all that costs more than its bytes; four at a time too",
        "taken or refused by the limit's name, and no stream waits",
        large.run,
    ),
    Attack(
        "silent",
        "900 connections that say nothing and 300 that say half a head",
        "others are answered",
        connections.silent,
    ),
    Attack(
        "slow bodies",
        "eight bodies of 32 MiB without their last byte",
        "for some seconds a 503 by its limit, then they make room",
        connections.slow_bodies,
    ),
    Attack(
        "deaf",
        "64 clients that ask for long streams and read nothing",
        "their rows end at endpoint.unread_tokens_max",
        connections.deaf,
    ),
    Attack(
        "hasty",
        "clients that hang up after the first bytes of a stream, without end",
        "their rows end at once",
        connections.hasty,
    ),
    Attack(
        "spying",
        "a tenant looks for another's agent by every route, spelling and count",
        "as if the other's agent did not exist",
        tenants.spying,
    ),
    Attack(
        "greedy",
        "two hundred long requests at a time of one tenant, beside another's short ones",
        "the others go on, with their share",
        tenants.greedy,
    ),
    Attack(
        "disk",
        "the disk of the home is full, and has room again",
        "answers go on; what cannot be kept says so; nothing kept is lost",
        disk.run,
    ),
    Attack(
        "descriptors",
        "the endpoint may open no further files",
        "running streams go on; afterwards new ones begin again",
        connections.no_descriptors,
    ),
    Attack(
        "engine",
        "the replica's engine thread stops, as with a device that hangs",
        "streams fail or go on elsewhere in bounded time, and it answers again",
        engine.run,
        judged=False,
    ),
)
