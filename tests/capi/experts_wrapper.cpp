// Everything in crossrail_experts.hpp, with two ranks that are threads.
#include "check.hpp"

#include <crossrail_experts.hpp>

#include <thread>

namespace {

using namespace std::chrono_literals;

static_assert(is_handle<crossrail::group>() && is_handle<crossrail::experts>() && is_handle<crossrail::exchange>());

void one_rank(const char *tls, std::uint32_t me, const char *store) {
    const crossrail::context context({{"tls", tls}, {"net_devices", "127.0.0.1"}, {"timeout", "20"}, {"log", "error"}});
    xrail_group_options joins;
    XRAIL_INIT(joins);
    joins.flags = XRAIL_GIVEN_RANK;
    joins.rank = me;
    joins.size = 2;
    joins.store = store;
    const crossrail::group group(context, &joins);
    CHECK(group.rank() == me && group.size() == 2 && group.store() == store);
    group.publish("hello", std::string("from \0", 6) + std::to_string(me));
    const std::vector<std::string> said = group.collect("hello", {1, 0});
    CHECK(said.size() == 2 && said[0] == std::string("from \0", 6) + "1");
    group.wait();

    xrail_experts_options options;
    XRAIL_INIT(options);
    options.max_tokens = 4;
    options.hidden = 8;
    options.experts = 2;
    options.topk = 1;
    const crossrail::experts experts(context, group, options);
    experts.connect();
    CHECK(experts.connected() == (std::vector<std::uint32_t>{0, 1}) && experts.masked().empty());

    // Each rank sends one token to the other's expert, which returns it as it is.
    std::vector<std::uint16_t> x(8, static_cast<std::uint16_t>(0x3f80 + me)), sums(8);
    const std::int64_t other = 1 - me;
    const float weight = 2;
    crossrail::exchange dispatch = experts.dispatch(x.data(), &other, &weight, 1);
    const auto receipt = dispatch.wait();
    CHECK(receipt && receipt->wire_bytes == 16 && dispatch.missing().empty());
    const xrail_delivered in = dispatch.delivered();
    CHECK(in.counts[0] == 1 && static_cast<const std::uint16_t *>(in.rows)[0] == 0x3f80 + other);
    crossrail::exchange combine = experts.combine(dispatch, in.rows, in.rows_size, sums.data(), sums.size() * 2);
    CHECK(combine.wait(20s)); // doubled: the next exponent
    for (const std::uint16_t bits : sums) CHECK(bits == 0x4000 + me);
    CHECK(failure_of([&] { combine.delivered(); }).result() == XRAIL_ERROR_USAGE);

    // One that is dropped is finished, so the other rank need not wait for it.
    { const crossrail::exchange dropped = experts.sync(); }
    crossrail::exchange sync = experts.sync();
    sync = experts.sync(); // finishes the first
    CHECK(sync.wait());
    experts.mask({static_cast<std::uint32_t>(other)});
    CHECK(experts.masked().size() == 1 && experts.links().find("masked") != std::string::npos);
    group.barrier("masked");
    experts.unmask({static_cast<std::uint32_t>(other)});
    group.barrier("unmasked");
    CHECK(experts.sync().wait() && experts.faults().empty());
    CHECK(failure_of([&] { group.barrier("nobody comes", 1ms, {9}); }).result() == XRAIL_ERROR_USAGE);
    group.barrier("done");
    experts.disconnect({static_cast<std::uint32_t>(other)});
    CHECK(experts.connected().size() == 1);
    experts.interrupt();
    group.interrupt();
    experts.close();
    CHECK(failure_of([&] { experts.sync(); }).result() == XRAIL_ERROR_CLOSED);
    group.leave();
    CHECK(failure_of([&] { group.barrier("left"); }).result() == XRAIL_ERROR_CLOSED);
}

} // namespace

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    std::thread other([&] { one_rank(argv[1], 1, argv[2]); });
    one_rank(argv[1], 0, argv[2]);
    other.join();
    std::puts("good");
    return 0;
}
