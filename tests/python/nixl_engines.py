"""How programs call NIXL: their sequences of calls, with the forms of arguments that they use, on two agents.

Each is a function of two agents' names that raises what is wrong. Bytes are compared over the whole memory.
"""

from __future__ import annotations

import base64
import pickle
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from crossrail.nixl import _api as nixl_api
from crossrail.nixl import _bindings as nixl_bindings
from crossrail.nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

LIMIT_S = 20


def until(what: Callable[[], Any], name: str) -> Any:
    """The first true answer of `what`, asked again and again."""
    deadline = time.monotonic() + LIMIT_S
    while not (answer := what()):
        assert time.monotonic() < deadline, f"{name} did not happen"
        time.sleep(0)
    return answer


def pool(regions: int, size: int, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, size, np.uint8) for _ in range(regions)]


def region_rows(regions: list[np.ndarray], page: int, device: int = 0) -> np.ndarray:
    """One row for each page, region by region, as vLLM and SGLang lay them out."""
    bases = np.array([one.ctypes.data for one in regions], np.uint64)
    offsets = np.arange(regions[0].nbytes // page, dtype=np.uint64) * np.uint64(page)
    rows = np.empty((len(bases) * len(offsets), 3), np.uint64)
    rows[:, 0] = (bases[:, None] + offsets[None, :]).ravel()
    rows[:, 1], rows[:, 2] = page, device
    return rows


def same(ours: list[np.ndarray], theirs: list[np.ndarray], page: int, pairs: list[tuple[int, int]]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        left, right = mine.reshape(-1, page), other.reshape(-1, page)
        for a, b in pairs:
            assert np.array_equal(left[a], right[b]), (a, b)


def vllm_pull(producer_name: str, consumer_name: str) -> None:
    """The consumer's handshake thread learns of the producer and prepares; its main thread reads blocks."""
    blocks, page, layers = 64, 576, 6
    theirs, ours = pool(layers, blocks * page, 1), pool(layers, blocks * page, 2)
    before = [one.copy() for one in ours]
    config = nixl_agent_config(num_threads=4, capture_telemetry=True)
    producer, consumer = nixl_agent(producer_name, config), nixl_agent(consumer_name, config)
    for agent, caches in ((producer, theirs), (consumer, ours)):
        descs = agent.get_reg_descs([(one.ctypes.data, one.nbytes, 0, "") for one in caches], "DRAM")
        agent.register_memory(descs, backends=["UCX"])
    local = consumer.prep_xfer_dlist("NIXL_INIT_AGENT", consumer.get_xfer_descs(region_rows(ours, page), "DRAM"))
    handshake: dict[str, Any] = {}

    def shake_hands() -> None:
        name = consumer.add_remote_agent(producer.get_agent_metadata())
        handshake["name"] = name
        descs = consumer.get_xfer_descs(region_rows(theirs, page), "DRAM")
        handshake["remote"] = consumer.prep_xfer_dlist(name, descs)

    thread = threading.Thread(target=shake_hands)
    thread.start()
    thread.join(LIMIT_S)
    assert handshake["name"] == producer_name.encode()

    pairs = [(3, 40), (4, 41), (10, 0), (63, 7)]
    mine = np.concatenate([layer * blocks + np.array([a for a, _ in pairs]) for layer in range(layers)])
    other = np.concatenate([layer * blocks + np.array([b for _, b in pairs]) for layer in range(layers)])
    assert mine.dtype == np.int64
    handle = consumer.make_prepped_xfer("READ", local, mine, handshake["remote"], other, notif_msg=b"request-1:1")
    in_transfer = {handle: time.perf_counter()}  # handles are keys there
    consumer.transfer(handle)
    until(lambda: consumer.check_xfer_state(handle) == "DONE", "the read")
    telemetry = consumer.get_xfer_telemetry(handle)
    assert telemetry.totalBytes == len(mine) * page
    assert 0 < telemetry.descCount <= len(mine) and 0 < telemetry.postDuration <= telemetry.xferDuration
    consumer.release_xfer_handle(handle)
    del in_transfer[handle]
    same(ours, theirs, page, pairs)
    for now, then in zip(ours, before, strict=True):
        rest = [at for at in range(blocks) if at not in dict(pairs)]
        assert np.array_equal(now.reshape(-1, page)[rest], then.reshape(-1, page)[rest])
    consumer.send_notif(handshake["name"], notif_msg=b"HB:request-2,request-3")
    consumer.send_notif(handshake["name"], notif_msg=b"request-2:1")  # cached: nothing to read
    got: list[bytes] = []

    def producer_step() -> bool:
        for messages in producer.get_new_notifs().values():
            got.extend(messages)
        return len(got) == 3

    until(producer_step, "three notifications")
    assert sorted(got) == [b"HB:request-2,request-3", b"request-1:1", b"request-2:1"]
    consumer.release_dlist_handle(local)
    consumer.release_dlist_handle(handshake["remote"])
    consumer.remove_remote_agent(handshake["name"])
    consumer.deregister_memory(consumer.get_reg_descs([(o.ctypes.data, o.nbytes, 0, "") for o in ours], "DRAM"))


def vllm_push(producer_name: str, consumer_name: str) -> None:
    """The producer's writer thread polls for a registration and writes; the consumer looks for its notification."""
    blocks, page = 32, 2304
    theirs, ours = pool(2, blocks * page, 3), pool(2, blocks * page, 4)
    producer = nixl_agent(producer_name, nixl_agent_config(num_threads=4, capture_telemetry=True))
    consumer = nixl_agent(consumer_name, nixl_agent_config(num_threads=4, capture_telemetry=True))
    for agent, caches in ((producer, ours), (consumer, theirs)):
        agent.register_memory([(one.ctypes.data, one.nbytes, 0, "") for one in caches], "DRAM", backends=["UCX"])
    consumer.add_remote_agent(producer.get_agent_metadata())
    errors: list[BaseException] = []

    def writer() -> None:
        try:
            message = until(lambda: producer.get_new_notifs().get(consumer_name), "PUSH_REG")[0]
            assert message.startswith(b"PUSH_REG:")
            ids = np.frombuffer(message[len(b"PUSH_REG:") :], np.int64)
            name = producer.add_remote_agent(consumer.get_agent_metadata())
            # Another tensor-parallel size: halves of each page, as Python tuples.
            half = page // 2
            tuples = [(int(a) + slot * half, half, 0) for a, _, _ in region_rows(ours, page) for slot in (0, 1)]
            there = [(int(a) + slot * half, half, 0) for a, _, _ in region_rows(theirs, page) for slot in (0, 1)]
            local = producer.prep_xfer_dlist("NIXL_INIT_AGENT", producer.get_xfer_descs(tuples, "DRAM"))
            remote = producer.prep_xfer_dlist(name, producer.get_xfer_descs(there, "DRAM"))
            index = np.concatenate([2 * (region * blocks + ids) + slot for region in (0, 1) for slot in (0, 1)])
            handle = producer.make_prepped_xfer("WRITE", local, index, remote, index, notif_msg=b"done:1")
            producer.transfer(handle)
            until(lambda: producer.check_xfer_state(handle) == "DONE", "the write")
            producer.release_xfer_handle(handle)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=writer)
    thread.start()
    ids = np.array([5, 6, 20], np.int64)
    consumer.send_notif(producer_name, b"PUSH_REG:" + ids.tobytes())
    until(lambda: errors or consumer.get_new_notifs().get(producer_name) == [b"done:1"], "the notification")
    same(theirs, ours, page, [(int(at), int(at)) for at in ids])
    thread.join(LIMIT_S)
    if errors:
        raise errors[0]


def sglang(prefill_name: str, decode_name: str) -> None:
    """No backend at first; lists once per peer; a write per chunk with int32 indices; tags counted; handles dropped."""
    slots, item, layers = 48, 512, 4
    kv, there = pool(layers, slots * item, 5), pool(layers, slots * item, 6)
    aux, aux_there = pool(1, 256, 7)[0], pool(1, 256, 8)[0]
    config = nixl_agent_config(backends=[], num_threads=8, sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
    prefill, decode = nixl_agent(prefill_name, config), nixl_agent(decode_name, config)
    for agent, caches, extra in ((prefill, kv, aux), (decode, there, aux_there)):
        assert "UCX" in agent.get_plugin_list()
        agent.create_backend("UCX", {"num_threads": "8"})
        assert agent.register_memory([(one.ctypes.data, one.nbytes, 0, "") for one in caches], "DRAM")
        assert agent.register_memory([(extra.ctypes.data, extra.nbytes, 0, "")], "DRAM")
    name = prefill.add_remote_agent(decode.get_agent_metadata()).decode()
    source = prefill.prep_xfer_dlist("", region_rows(kv, item), "DRAM")
    target = prefill.prep_xfer_dlist(name, region_rows(there, item), "DRAM")
    chunks = [(np.arange(0, 8), np.arange(8, 16)), (np.array([20, 3, 7]), np.array([1, 2, 40]))]
    for chunk, (mine, other) in enumerate(chunks):
        last = chunk == len(chunks) - 1
        left = np.concatenate([layer * slots + mine for layer in range(layers)]).astype(np.int32)
        right = np.concatenate([layer * slots + other for layer in range(layers)]).astype(np.int32)
        tag = f"7_kv_{chunk}_{int(last)}_0".encode("ascii")
        handle = prefill.make_prepped_xfer("WRITE", source, left, target, right, tag)
        assert prefill.transfer(handle) != "ERR"
        until(lambda handle=handle: prefill.check_xfer_state(handle) == "DONE", "a chunk")
        del handle
    here = prefill.get_xfer_descs([(aux.ctypes.data, aux.nbytes, 0)], "DRAM")
    away = prefill.get_xfer_descs([(aux_there.ctypes.data, aux_there.nbytes, 0)], "DRAM")
    handle = prefill.initialize_xfer("WRITE", here, away, name, b"7_aux")
    assert prefill.transfer(handle) != "ERR"
    until(lambda: prefill.check_xfer_state(handle) == "DONE", "the auxiliary data")
    rooms: dict[int, set[str]] = {}

    def arrived() -> bool:
        for messages in decode.get_new_notifs().values():
            for message in messages:
                room, rest = message.decode("ascii").split("_", 1)
                rooms.setdefault(int(room), set()).add(rest)
        return rooms.get(7) == {"kv_0_0_0", "kv_1_1_0", "aux"}

    until(arrived, "all tags of room 7")
    for mine, other in chunks:
        same(kv, there, item, list(zip(mine.tolist(), other.tolist(), strict=True)))
    assert np.array_equal(aux, aux_there)


def lmcache(sender_name: str, receiver_name: str) -> None:
    """Metadata first, then serialized descriptors; index lists; no notification; polled each millisecond."""
    pages, size = 16, 4096
    ours, theirs = pool(1, pages * size, 9)[0], pool(1, pages * size, 10)[0]
    agents = [nixl_agent(name, nixl_agent_config(backends=["UCX"])) for name in (sender_name, receiver_name)]
    lists = []
    for agent, memory in zip(agents, (ours, theirs), strict=True):
        descs = agent.get_reg_descs([(memory.ctypes.data, memory.nbytes, 3, "")], mem_type="DRAM")
        agent.register_memory(descs)
        rows = [(memory.ctypes.data + at * size, size, 3) for at in range(pages)]
        lists.append(agent.get_xfer_descs(rows, mem_type="DRAM"))
    sender, receiver = agents
    local = sender.prep_xfer_dlist("", lists[0], mem_type="DRAM")
    name = sender.add_remote_agent(receiver.get_agent_metadata())
    there = sender.deserialize_descs(receiver.get_serialized_descs(lists[1]))
    assert there == lists[1]
    remote = sender.prep_xfer_dlist(name, there)
    handle = sender.make_prepped_xfer("WRITE", local, [0, 1, 5], remote, [2, 9, 3])
    sender.transfer(handle)
    while (state := sender.check_xfer_state(handle)) != "DONE":
        assert state == "PROC"
        time.sleep(0.001)
    same([ours], [theirs], size, [(0, 2), (1, 9), (5, 3)])


def dynamo(reader_name: str, writer_name: str) -> None:
    """Registers, adds, transfers, removes, all over again for each operation; the notification goes with the post."""
    reader, writer = nixl_api.nixl_agent(reader_name), nixl_api.nixl_agent(writer_name)
    for turn in range(4):
        source, target = pool(1, 10_001, 11 + turn)[0], np.zeros(10_001, np.uint8)
        there = writer.register_memory([(source.ctypes.data, source.nbytes, 0, "")], "DRAM")
        here = reader.register_memory([(target.ctypes.data, target.nbytes, 0, "")], "DRAM")
        packed = base64.b64encode(zlib.compress(writer.get_agent_metadata()))
        name = reader.add_remote_agent(zlib.decompress(base64.b64decode(packed))).decode()
        local: nixl_bindings.nixlXferDList = reader.get_xfer_descs(
            [(target.ctypes.data, target.nbytes, 0)], mem_type="cpu"
        )
        remote = reader.get_xfer_descs([(source.ctypes.data, source.nbytes, 0)], mem_type="cpu")
        handle = reader.initialize_xfer(
            operation="READ", local_descs=local, remote_descs=remote, remote_agent=name, notif_msg=b""
        )
        reader.transfer(handle, f"operation-{turn}".encode())
        until(lambda handle=handle: reader.check_xfer_state(handle) == "DONE", "the read")
        assert np.array_equal(source, target)
        until(
            lambda turn=turn: f"operation-{turn}".encode() in writer.update_notifs().get(reader_name, []),
            "its notification",
        )
        reader.release_xfer_handle(handle)
        reader.remove_remote_agent(name)
        reader.deregister_memory(here)
        writer.deregister_memory(there)


def verl(name_a: str, name_b: str) -> None:
    """A ring of two: buckets of one row each, read in turns; lists are pickled objects."""
    agents = [nixl_agent(name) for name in (name_a, name_b)]
    buckets = [pool(2, 65_536, 20 + at) for at in range(2)]
    lists = []
    for agent, pair in zip(agents, buckets, strict=True):
        for one in pair:
            agent.register_memory([(one.ctypes.data, one.nbytes, 0, "")], "DRAM")
        lists.append([agent.get_xfer_descs([(one.ctypes.data, one.nbytes, 0)], "DRAM") for one in pair])
    first, second = agents
    name = second.add_remote_agent(first.get_agent_metadata()).decode()
    first.add_remote_agent(second.get_agent_metadata())
    for turn in range(2):
        there = pickle.loads(pickle.dumps(lists[0][turn]))
        handle = second.initialize_xfer("READ", lists[1][turn], there, name, f"bucket-{turn}")
        assert second.transfer(handle) != "ERR"
        until(lambda handle=handle: second.check_xfer_state(handle) == "DONE", "a bucket")
        tag = f"bucket-{turn}".encode()
        until(lambda tag=tag: first.check_remote_xfer_done(name_b, tag), "its notification")
        assert np.array_equal(buckets[0][turn], buckets[1][turn])
        second.release_xfer_handle(handle)
    second.remove_remote_agent(name)


def collectivex(initiator_name: str, target_name: str) -> None:
    """A handle per request of the batch, made once and posted again at each repetition; pull and push."""
    page, pages, requests = 528, 96, 3
    config = nixl_agent_config(True, False, 0, backends=["UCX"])
    initiator, target = nixl_agent(initiator_name, config), nixl_agent(target_name, config)
    ours, theirs = pool(1, page * pages, 30)[0], pool(1, page * pages, 31)[0]
    for agent, memory in ((initiator, ours), (target, theirs)):
        assert agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "pool")], mem_type="cpu") is not None
    name = initiator.add_remote_agent(target.get_agent_metadata()).decode()
    order = np.random.default_rng(0).permutation(pages)
    for operation in ("READ", "WRITE"):
        handles = []
        for request in range(requests):
            ids = order[request::requests]
            rows = [
                np.stack([memory.ctypes.data + ids * page, np.full(len(ids), page), np.zeros(len(ids), int)], 1)
                for memory in (ours, theirs)
            ]
            local, remote = (initiator.get_xfer_descs(each.astype(np.uint64), mem_type="cpu") for each in rows)
            handles.append(initiator.initialize_xfer(operation, local, remote, name, b""))
        source, sink = (theirs, ours) if operation == "READ" else (ours, theirs)
        for repetition in range(3):
            source[:] = np.random.default_rng(repetition).integers(0, 256, source.size, np.uint8)
            for handle in handles:
                initiator.transfer(handle)
            for handle in handles:
                until(lambda handle=handle: initiator.check_xfer_state(handle) == "DONE", "a request")
            assert np.array_equal(source, sink)
        for handle in handles:
            initiator.release_xfer_handle(handle)


def ray(reader_name: str, owner_name: str) -> None:
    """Reads into `trim()` of a registration; removes and adds the agent when the owner's memory has changed."""
    reader, owner = nixl_agent(reader_name), nixl_agent(owner_name)
    for version in range(3):
        tensors, targets = pool(3, 1000, 40 + version), [np.zeros(1000, np.uint8) for _ in range(3)]
        theirs = owner.register_memory([(one.ctypes.data, one.nbytes, 0, b"") for one in tensors], "DRAM")
        message = owner.get_agent_metadata(), owner.get_serialized_descs(theirs.trim())
        if version:
            reader.remove_remote_agent(owner_name)
        name = reader.add_remote_agent(message[0])
        mine = reader.register_memory([(one.ctypes.data, one.nbytes, 0, b"") for one in targets], "DRAM")
        handle = reader.initialize_xfer("READ", mine.trim(), reader.deserialize_descs(message[1]), name, "fetched")
        reader.transfer(handle)
        until(lambda handle=handle: reader.check_xfer_state(handle) == "DONE", "the fetch")
        assert all(np.array_equal(a, b) for a, b in zip(tensors, targets, strict=True))
        reader.release_xfer_handle(handle)
        reader.deregister_memory(mine)
        owner.deregister_memory(theirs)


PROGRAMS = (vllm_pull, vllm_push, sglang, lmcache, dynamo, verl, collectivex, ray)
