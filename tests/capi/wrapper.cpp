// Everything in crossrail.hpp, between two workers of one process.
#include "check.hpp"

#include <future>

namespace {

static_assert(is_handle<crossrail::context>() && is_handle<crossrail::worker>() && is_handle<crossrail::endpoint>());
static_assert(is_handle<crossrail::region>() && is_handle<crossrail::request>() && is_handle<crossrail::layout>());
static_assert(is_handle<crossrail::prepared>() && is_handle<crossrail::description>());

void limits() {
    using namespace std::chrono_literals;
    using crossrail::timeout;
    CHECK(timeout(3ms).us() == 3000 && timeout(0s).us() == 0);
    CHECK(timeout(-1us).us() == 0 && timeout(-5h).us() == 0); // a passed deadline is not the default
    CHECK(timeout(std::chrono::hours::max()).us() == XRAIL_FOREVER);
    CHECK(timeout(std::chrono::duration<double>(0.25)).us() == 250000);
    CHECK(timeout::standard().us() == XRAIL_DEFAULT && timeout::forever().us() == XRAIL_FOREVER);
}

} // namespace

int main(int argc, char **argv) {
    using namespace std::chrono_literals;
    limits();
    crossrail::context context({{"tls", argc > 1 ? argv[1] : "shm"}, {"net_devices", "127.0.0.1"}, {"timeout", "20"}});
    crossrail::worker a(context), b(context);
    auto dialled = std::async(std::launch::async, [&] { return a.connect(b.address()); });
    crossrail::endpoint to_a = b.accept();
    crossrail::endpoint to_b = dialled.get();
    CHECK(!to_b.peer().empty() && to_b.explain(XRAIL_JSON)[0] == '{' && !b.listens().empty() && b.listens(99).empty());

    // Messages.
    char in[8] = "", out[8] = "message";
    crossrail::request receive = b.recv(in, sizeof in, 7, XRAIL_ALL_BITS, &to_a);
    CHECK(!receive.test());
    crossrail::error late = failure_of([&] { receive.wait(1ms); });
    CHECK(late.result() == XRAIL_ERROR_TIMEOUT && std::string(late.what()).find(late.detail()) != std::string::npos);
    to_b.send(out, sizeof out, 7).wait();
    CHECK(b.wait_any({&receive}) == 0 && receive.wait().bytes == 8 && receive.test()->tag == 7);
    CHECK(std::string(in) == "message" && receive.report().find("8 bytes") == 0);

    // A request that is dropped has let go of its buffer.
    {
        std::vector<char> gone(1 << 20);
        crossrail::request dropped = b.recv(gone.data(), gone.size(), 8);
        crossrail::request moved = std::move(dropped);
        CHECK(dropped.get() == nullptr && moved.get() != nullptr);
        moved = b.recv(gone.data(), gone.size(), 9); // ends the other
    }

    // Memory, rows, notices.
    std::vector<char> here(64 * 16), there(64 * 16);
    for (std::size_t at = 0; at < there.size(); at++) there[at] = static_cast<char>(at * 7);
    crossrail::region mine = a.register_memory(here.data(), here.size());
    crossrail::region theirs = b.register_memory(there.data(), there.size());
    crossrail::description described(b.describe({&theirs}));
    CHECK(described.regions().size() == 1 && described.regions()[0].size == there.size() && !described.address().empty());
    CHECK(failure_of([] { crossrail::description nothing("\1\2"); }).result() < 0);
    xrail_row own{reinterpret_cast<std::uintptr_t>(here.data()), 16, 16, 64}, far = own;
    far.address = described.regions()[0].address;
    crossrail::layout local = a.rows({own}, {&mine}), remote = to_b.rows({far}, described);
    xrail_move_options options;
    XRAIL_INIT(options);
    options.notice = "moved";
    options.notice_size = 5;
    crossrail::prepared read = to_b.prepare(XRAIL_READ, local, remote, &options);
    CHECK(b.take_notices().empty());
    read.start().wait();
    CHECK(here == there && !read.explain().empty());
    std::vector<crossrail::notice> notices;
    while ((notices = b.take_notices()).empty()) b.wait();
    CHECK(notices.size() == 1 && notices[0].data == "moved" && notices[0].peer == to_a.peer());
    xrail_op_options imm;
    XRAIL_INIT(imm);
    imm.flags = XRAIL_IMM;
    imm.imm = 5;
    to_b.write(out, sizeof out, theirs.key(), 0, &imm).wait();
    theirs.wait_imm(5, 1);
    to_b.read(in, 4, described.regions()[0].key, 1).wait();
    CHECK(std::string(in, 4) == "essa");
    to_b.notify("x", 1).wait();
    theirs.deregister();
    CHECK(failure_of([&] { theirs.deregister(); }).result() == XRAIL_ERROR_REGION);

    // Ends.
    crossrail::request pending = b.recv(in, sizeof in, 10);
    pending.cancel();
    CHECK(failure_of([&] { pending.wait(); }).result() == XRAIL_ERROR_CANCELLED);
    b.progress();
    b.interrupt();
    to_b.close();
    a.close();
    CHECK(failure_of([&] { a.address(); }).result() == XRAIL_ERROR_CLOSED);
    crossrail::error refused = failure_of([&] { b.connect("127.0.0.1:1", 5s, "tcp"); });
    CHECK(refused.reason() == "not_listening" && refused.os_error() != 0 && !refused.operation().empty());
    std::puts("good");
    return 0;
}
