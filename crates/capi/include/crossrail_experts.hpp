/* C++17 over crossrail_experts.h, as crossrail.hpp is over crossrail.h: handles that free themselves, failures as
 * exceptions. Header only. An exchange that is destroyed before it is over is finished: the other ranks wait for it. */
#ifndef CROSSRAIL_EXPERTS_HPP
#define CROSSRAIL_EXPERTS_HPP
#include <crossrail.hpp>
#include <crossrail_experts.h>

namespace crossrail {

namespace detail {
inline std::vector<std::uint32_t> taken(std::uint32_t *ranks, std::size_t count) {
    std::unique_ptr<std::uint32_t, free_block> owned(ranks);
    return std::vector<std::uint32_t>(ranks, ranks + count);
}
} // namespace detail

class group {
public:
    explicit group(const context &of, const xrail_group_options *options = nullptr) {
        xrail_group *handle = nullptr;
        check(xrail_group_join(of.get(), options, &handle));
        handle_.reset(handle);
    }
    std::uint32_t rank() const { return place().first; }
    std::uint32_t size() const { return place().second; }
    std::string store() const {
        char *text = nullptr;
        check(xrail_group_store(get(), &text));
        return detail::taken(text);
    }
    /* Without ranks: all of them. */
    void barrier(const std::string &name, timeout limit = timeout::standard(),
                 const std::vector<std::uint32_t> &ranks = {}) const {
        check(xrail_group_barrier(get(), name.c_str(), ranks.data(), ranks.size(), limit.us()));
    }
    void wait(const std::vector<std::uint32_t> &ranks = {}, timeout limit = timeout::standard()) const {
        check(xrail_group_wait(get(), ranks.data(), ranks.size(), limit.us()));
    }
    void publish(const std::string &key, const std::string &value) const {
        check(xrail_group_publish(get(), key.c_str(), value.data(), value.size()));
    }
    std::vector<std::string> collect(const std::string &key, const std::vector<std::uint32_t> &ranks = {},
                                     timeout limit = timeout::standard()) const {
        xrail_bytes *first = nullptr;
        check(xrail_group_collect(get(), key.c_str(), ranks.data(), ranks.size(), limit.us(), &first));
        std::unique_ptr<xrail_bytes, detail::free_block> owned(first);
        std::vector<std::string> all;
        for (std::size_t at = 0, count = ranks.empty() ? size() : ranks.size(); at < count; at++)
            all.emplace_back(static_cast<const char *>(first[at].data), first[at].size);
        return all;
    }
    void leave() const { check(xrail_group_leave(get())); }
    void interrupt() const noexcept { xrail_group_interrupt(get()); }
    xrail_group *get() const noexcept { return handle_.get(); }

private:
    std::pair<std::uint32_t, std::uint32_t> place() const {
        std::uint32_t rank = 0, size = 0;
        check(xrail_group_rank(get(), &rank, &size));
        return {rank, size};
    }
    detail::owned<xrail_group, xrail_group_free> handle_;
};

class exchange {
public:
    exchange() noexcept = default;
    explicit exchange(xrail_exchange *handle) noexcept : handle_(handle) {}
    exchange(exchange &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    exchange &operator=(exchange &&other) noexcept {
        if (this != &other) {
            end();
            handle_ = std::exchange(other.handle_, nullptr);
        }
        return *this;
    }
    ~exchange() { end(); }

    /* The receipt, or nothing if it is not over within the limit. */
    std::optional<xrail_exchange_receipt> wait(timeout limit = timeout::forever()) const {
        xrail_exchange_receipt receipt;
        XRAIL_INIT(receipt);
        return check(xrail_exchange_wait(get(), limit.us(), &receipt)) ? std::make_optional(receipt) : std::nullopt;
    }
    /* Of a dispatch that is over. */
    xrail_delivered delivered() const {
        xrail_delivered all;
        XRAIL_INIT(all);
        check(xrail_exchange_delivered(get(), &all));
        return all;
    }
    std::vector<std::uint32_t> missing() const {
        std::uint32_t *ranks = nullptr;
        std::size_t count = 0;
        check(xrail_exchange_missing(get(), &ranks, &count));
        return detail::taken(ranks, count);
    }
    xrail_exchange *get() const noexcept { return handle_; }

private:
    void end() noexcept {
        /* Bounded: ranks that do not arrive are lost. */
        xrail_result result = XRAIL_ERROR_INTERRUPTED;
        while (handle_ != nullptr && (result == XRAIL_ERROR_INTERRUPTED || result == XRAIL_PENDING))
            result = xrail_exchange_finish(&handle_, XRAIL_FOREVER, nullptr);
        handle_ = nullptr;
    }
    xrail_exchange *handle_ = nullptr;
};

/* A dispatch or combine in a stream of a GPU. The stream must live until this is destroyed. */
class enqueued {
public:
    explicit enqueued(xrail_enqueued *handle) noexcept : handle_(handle) {}
    /* Enqueues the receiving half, of one with XRAIL_SEND_ONLY. */
    void receive(void *stream) const { check(xrail_enqueued_receive(get(), stream)); }
    /* Later work in the stream runs after it. */
    void before(void *stream) const { check(xrail_enqueued_before(get(), stream)); }
    /* Whether it is done within the limit. */
    bool wait(timeout limit = timeout::standard()) const { return check(xrail_enqueued_wait(get(), limit.us())); }
    /* Received rows, of one with XRAIL_COUNTS; nothing if they are not known within the limit. */
    std::optional<std::uint64_t> rows(timeout limit = timeout::standard()) const {
        std::uint64_t rows = 0;
        const bool known = check(xrail_enqueued_rows(get(), limit.us(), &rows, nullptr, 0));
        return known ? std::make_optional(rows) : std::nullopt;
    }
    xrail_delivered delivered() const {
        xrail_delivered all;
        XRAIL_INIT(all);
        check(xrail_enqueued_delivered(get(), &all));
        return all;
    }
    xrail_enqueued *get() const noexcept { return handle_.get(); }

private:
    detail::owned<xrail_enqueued, xrail_enqueued_free> handle_;
};

/* A prepared operation of a buffer on a GPU: launched as often as wanted. */
class gpu_call {
public:
    explicit gpu_call(xrail_gpu_call *handle) noexcept : handle_(handle) {}
    /* Of a prepared dispatch. */
    gpu_call combine(const void *y, void *sums, const xrail_gpu_combine_options *options = nullptr) const {
        xrail_gpu_call *made = nullptr;
        check(xrail_gpu_prepare_combine(get(), y, options, sums, &made));
        return gpu_call(made);
    }
    enqueued launch(void *stream) const { return launched(nullptr, stream); }
    /* The combine of `dispatch`. */
    enqueued launch(const enqueued &dispatch, void *stream) const { return launched(dispatch.get(), stream); }
    xrail_gpu_call *get() const noexcept { return handle_.get(); }

private:
    enqueued launched(const xrail_enqueued *dispatch, void *stream) const {
        xrail_enqueued *made = nullptr;
        check(xrail_gpu_launch(get(), dispatch, stream, &made));
        return enqueued(made);
    }
    detail::owned<xrail_gpu_call, xrail_gpu_call_free> handle_;
};

class experts {
public:
    /* Allocates; then connect(). */
    experts(const context &of, const group &among, const xrail_experts_options &options) {
        xrail_experts *handle = nullptr;
        check(xrail_experts_create(of.get(), among.get(), &options, &handle));
        handle_.reset(handle);
    }
    /* Without ranks: all of them. */
    void connect(const std::vector<std::uint32_t> &ranks = {}, timeout limit = timeout::standard(),
                 std::uint32_t flags = 0) const {
        check(xrail_experts_connect(get(), ranks.data(), ranks.size(), flags, limit.us()));
    }
    void disconnect(const std::vector<std::uint32_t> &ranks) const {
        check(xrail_experts_disconnect(get(), ranks.data(), ranks.size()));
    }
    void mask(const std::vector<std::uint32_t> &ranks) const {
        check(xrail_experts_mask(get(), ranks.data(), ranks.size()));
    }
    void unmask(const std::vector<std::uint32_t> &ranks) const {
        check(xrail_experts_unmask(get(), ranks.data(), ranks.size()));
    }
    std::vector<std::uint32_t> connected() const { return listed(xrail_experts_connected); }
    std::vector<std::uint32_t> masked() const { return listed(xrail_experts_masked); }
    exchange dispatch(const void *x, const std::int64_t *topk_idx, const float *topk_weights, std::size_t tokens,
                      const xrail_dispatch_options *options = nullptr) const {
        xrail_exchange *made = nullptr;
        check(xrail_experts_dispatch(get(), x, topk_idx, topk_weights, tokens, options, &made));
        return exchange(made);
    }
    /* Sizes in bytes. */
    exchange combine(const exchange &dispatch, const void *y, std::size_t y_size, void *sums, std::size_t sums_size,
                     const xrail_combine_options *options = nullptr) const {
        xrail_exchange *made = nullptr;
        check(xrail_experts_combine(get(), dispatch.get(), y, y_size, options, sums, sums_size, &made));
        return exchange(made);
    }
    /* Of a buffer on a GPU: addresses there. */
    enqueued gpu_dispatch(const void *x, const void *topk_idx, const float *topk_weights, std::size_t tokens,
                          const xrail_gpu_dispatch_options &options) const {
        xrail_enqueued *made = nullptr;
        check(xrail_gpu_dispatch(get(), x, topk_idx, topk_weights, tokens, &options, &made));
        return enqueued(made);
    }
    enqueued gpu_combine(const enqueued &dispatch, const void *y, void *sums,
                         const xrail_gpu_combine_options *options = nullptr) const {
        xrail_enqueued *made = nullptr;
        check(xrail_gpu_combine(get(), dispatch.get(), y, options, sums, &made));
        return enqueued(made);
    }
    gpu_call gpu_prepare(const void *x, const void *topk_idx, const float *topk_weights, std::size_t tokens,
                         const xrail_gpu_dispatch_options &options) const {
        xrail_gpu_call *made = nullptr;
        check(xrail_gpu_prepare_dispatch(get(), x, topk_idx, topk_weights, tokens, &options, &made));
        return gpu_call(made);
    }
    exchange sync() const {
        xrail_exchange *made = nullptr;
        check(xrail_experts_sync(get(), &made));
        return exchange(made);
    }
    std::string links(int format = XRAIL_TEXT) const {
        char *text = nullptr;
        check(xrail_experts_links(get(), format, &text));
        return detail::taken(text);
    }
    std::string faults(int format = XRAIL_TEXT) const {
        char *text = nullptr;
        check(xrail_experts_faults(get(), format, &text));
        return detail::taken(text);
    }
    /* Ends exchanges and connections; later calls throw CLOSED. */
    void close() const { check(xrail_experts_close(get())); }
    void interrupt() const noexcept { xrail_experts_interrupt(get()); }
    xrail_experts *get() const noexcept { return handle_.get(); }

private:
    template <class List> std::vector<std::uint32_t> listed(List list) const {
        std::uint32_t *ranks = nullptr;
        std::size_t count = 0;
        check(list(get(), &ranks, &count));
        return detail::taken(ranks, count);
    }
    detail::owned<xrail_experts, xrail_experts_free> handle_;
};

} // namespace crossrail
#endif
