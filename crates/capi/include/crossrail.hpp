/* C++17 over crossrail.h: handles that free themselves, failures as exceptions. Header only.
 *
 * Every class holds one handle, is moved but not copied, and gives the handle with get(). Functions throw
 * crossrail::error. Buffers stay the operation's until its request is over: a request that is destroyed before is
 * cancelled and awaited. What is not here is called through the handles. */
#ifndef CROSSRAIL_HPP
#define CROSSRAIL_HPP
#include <crossrail.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace crossrail {

/* A failure: what() is the whole text. */
class error : public std::runtime_error {
public:
    explicit error(const xrail_error &all)
        : std::runtime_error(all.text), result_(all.result), os_error_(all.os_error), reason_(all.reason),
          operation_(all.operation), detail_(all.detail), peer_(all.peer), lane_(all.lane), hint_(all.hint) {}
    xrail_result result() const noexcept { return result_; }
    int os_error() const noexcept { return os_error_; }
    const std::string &reason() const noexcept { return reason_; }
    const std::string &operation() const noexcept { return operation_; }
    const std::string &detail() const noexcept { return detail_; }
    const std::string &peer() const noexcept { return peer_; }
    const std::string &lane() const noexcept { return lane_; }
    const std::string &hint() const noexcept { return hint_; }

private:
    xrail_result result_;
    int os_error_;
    std::string reason_, operation_, detail_, peer_, lane_, hint_;
};

/* Throws for a failure; else whether it was OK, not PENDING. */
inline bool check(xrail_result result) {
    if (result < 0) throw error(*xrail_last_error());
    return result == XRAIL_OK;
}

/* A time limit: a duration, standard() (CROSSRAIL_TIMEOUT) or forever(). A duration below zero, as of a deadline that has
 * passed, does not wait. */
class timeout {
public:
    template <class Rep, class Period>
    timeout(std::chrono::duration<Rep, Period> limit) : us_(microseconds(std::chrono::duration<double>(limit), limit)) {}
    std::int64_t us() const noexcept { return us_; }
    static timeout forever() noexcept { return timeout(XRAIL_FOREVER); }
    static timeout standard() noexcept { return timeout(XRAIL_DEFAULT); }

private:
    template <class Limit> static std::int64_t microseconds(std::chrono::duration<double> about, Limit limit) {
        if (about.count() <= 0) return 0;
        if (about.count() >= 1e9) return XRAIL_FOREVER; /* more is clamped by the library, and would overflow here */
        return std::chrono::duration_cast<std::chrono::microseconds>(limit).count();
    }
    explicit timeout(std::int64_t us) noexcept : us_(us) {}
    std::int64_t us_;
};

namespace detail {
struct free_block {
    void operator()(void *block) const noexcept { xrail_free(block); }
};
inline std::string taken(char *text) {
    std::unique_ptr<char, free_block> owned(text);
    return std::string(owned.get());
}
inline std::string taken(void *bytes, std::size_t size) {
    std::unique_ptr<void, free_block> owned(bytes);
    return std::string(static_cast<const char *>(owned.get()), size);
}
template <class T, void (*Free)(T *)> struct freed {
    void operator()(T *handle) const noexcept { Free(handle); }
};
template <class T, void (*Free)(T *)> using owned = std::unique_ptr<T, freed<T, Free>>;
} // namespace detail

class request {
public:
    request() noexcept = default;
    explicit request(xrail_request *handle) noexcept : handle_(handle) {}
    request(request &&other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
    request &operator=(request &&other) noexcept {
        if (this != &other) {
            end();
            handle_ = std::exchange(other.handle_, nullptr);
        }
        return *this;
    }
    ~request() { end(); }

    /* The receipt once it is over; makes progress once. */
    std::optional<xrail_receipt> test() const {
        xrail_receipt receipt;
        XRAIL_INIT(receipt);
        return check(xrail_test(handle_, &receipt)) ? std::optional<xrail_receipt>(receipt) : std::nullopt;
    }
    xrail_receipt wait(timeout limit = timeout::standard()) const {
        xrail_receipt receipt;
        XRAIL_INIT(receipt);
        check(xrail_wait(handle_, limit.us(), &receipt));
        return receipt;
    }
    void cancel() const noexcept { xrail_cancel(handle_); }
    std::string report(int format = XRAIL_TEXT) const {
        char *text = nullptr;
        check(xrail_request_report(handle_, format, &text));
        return detail::taken(text);
    }
    xrail_request *get() const noexcept { return handle_; }
    /* Gives the handle up, as for XRAIL_QUEUE. */
    xrail_request *release() noexcept { return std::exchange(handle_, nullptr); }

private:
    void end() noexcept {
        if (handle_ != nullptr && xrail_request_free(handle_) == XRAIL_ERROR_BUSY) {
            xrail_cancel(handle_);
            /* Bounded: a cancelled operation ends. */
            while (handle_ != nullptr && xrail_finish(&handle_, XRAIL_FOREVER, nullptr) == XRAIL_ERROR_INTERRUPTED) {}
        }
        handle_ = nullptr;
    }
    xrail_request *handle_ = nullptr;
};

class context {
public:
    explicit context(const std::vector<std::pair<std::string, std::string>> &settings = {}, std::uint32_t flags = 0) {
        std::vector<xrail_setting> pairs;
        for (const auto &pair : settings) pairs.push_back({pair.first.c_str(), pair.second.c_str()});
        xrail_context_options options;
        XRAIL_INIT(options);
        options.flags = flags;
        options.settings = pairs.data();
        options.setting_count = pairs.size();
        xrail_context *handle = nullptr;
        check(xrail_context_create(&options, &handle));
        handle_.reset(handle);
    }
    xrail_context *get() const noexcept { return handle_.get(); }

private:
    detail::owned<xrail_context, xrail_context_free> handle_;
};

/* What another process has packed by worker::describe(). */
class description {
public:
    explicit description(const std::string &packed) {
        xrail_description *handle = nullptr;
        check(xrail_unpack(packed.data(), packed.size(), &handle));
        handle_.reset(handle);
    }
    struct region_there {
        std::uint64_t address, size;
        xrail_key key;
    };
    /* For worker::connect(). */
    std::string address() const {
        std::size_t size = 0;
        const void *bytes = xrail_description_address(get(), &size);
        return std::string(static_cast<const char *>(bytes), size);
    }
    std::vector<region_there> regions() const {
        std::vector<region_there> all;
        region_there one;
        while (check(xrail_description_region(get(), all.size(), &one.address, &one.size, &one.key))) all.push_back(one);
        return all;
    }
    xrail_description *get() const noexcept { return handle_.get(); }

private:
    detail::owned<xrail_description, xrail_description_free> handle_;
};

/* Rows of own memory (worker::rows) or of a peer's (endpoint::rows). */
class layout {
public:
    explicit layout(xrail_layout *handle) noexcept : handle_(handle) {}
    xrail_layout *get() const noexcept { return handle_.get(); }

private:
    detail::owned<xrail_layout, xrail_layout_free> handle_;
};

/* Rows paired by endpoint::prepare(). */
class prepared {
public:
    explicit prepared(xrail_move *handle) noexcept : handle_(handle) {}
    request start(const xrail_start_options *options = nullptr) const {
        xrail_request *made = nullptr;
        check(xrail_start(get(), options, &made));
        return request(made);
    }
    std::string explain(int format = XRAIL_TEXT) const {
        char *text = nullptr;
        check(xrail_move_explain(get(), format, &text));
        return detail::taken(text);
    }
    xrail_move *get() const noexcept { return handle_.get(); }

private:
    detail::owned<xrail_move, xrail_move_free> handle_;
};

struct notice {
    std::string peer, data;
};

class endpoint {
public:
    explicit endpoint(xrail_endpoint *handle) noexcept : handle_(handle) {}
    request send(const void *data, std::size_t size, std::uint64_t tag,
                 const xrail_op_options *options = nullptr) const {
        xrail_request *made = nullptr;
        check(xrail_send(get(), data, size, tag, options, &made));
        return request(made);
    }
    request write(const void *data, std::size_t size, const xrail_key &key, std::uint64_t offset,
                  const xrail_op_options *options = nullptr) const {
        xrail_request *made = nullptr;
        check(xrail_write(get(), data, size, &key, offset, options, &made));
        return request(made);
    }
    request read(void *data, std::size_t size, const xrail_key &key, std::uint64_t offset,
                 const xrail_op_options *options = nullptr) const {
        xrail_request *made = nullptr;
        check(xrail_read(get(), data, size, &key, offset, options, &made));
        return request(made);
    }
    request notify(const void *data, std::size_t size) const {
        xrail_request *made = nullptr;
        check(xrail_notify(get(), data, size, &made));
        return request(made);
    }
    layout rows(const std::vector<xrail_row> &rows, const description &there) const {
        xrail_layout *made = nullptr;
        check(xrail_layout_peer(get(), rows.data(), rows.size(), there.get(), &made));
        return layout(made);
    }
    prepared prepare(int kind, const layout &own, const layout &there,
                     const xrail_move_options *options = nullptr) const {
        xrail_move *made = nullptr;
        check(xrail_prepare(get(), kind, own.get(), there.get(), options, &made));
        return prepared(made);
    }
    std::string peer() const {
        char *text = nullptr;
        check(xrail_endpoint_peer(get(), &text));
        return detail::taken(text);
    }
    std::string explain(int format = XRAIL_TEXT) const {
        char *text = nullptr;
        check(xrail_endpoint_explain(get(), format, &text));
        return detail::taken(text);
    }
    void close(timeout limit = timeout::standard()) const { check(xrail_endpoint_close(get(), limit.us())); }
    xrail_endpoint *get() const noexcept { return handle_.get(); }

private:
    detail::owned<xrail_endpoint, xrail_endpoint_free> handle_;
};

class region {
public:
    explicit region(xrail_region *handle) noexcept : handle_(handle) {}
    xrail_key key() const {
        xrail_key key;
        check(xrail_region_key(get(), &key));
        return key;
    }
    void wait_imm(std::uint32_t imm, std::uint64_t count, timeout limit = timeout::standard()) const {
        check(xrail_imm_wait(get(), imm, count, limit.us()));
    }
    void deregister() const { check(xrail_deregister(get())); }
    xrail_region *get() const noexcept { return handle_.get(); }

private:
    detail::owned<xrail_region, xrail_region_free> handle_;
};

class worker {
public:
    explicit worker(const context &of, const xrail_worker_options *options = nullptr) {
        xrail_worker *handle = nullptr;
        check(xrail_worker_create(of.get(), options, &handle));
        handle_.reset(handle);
    }
    std::string address() const {
        void *bytes = nullptr;
        std::size_t size = 0;
        check(xrail_worker_address(get(), &bytes, &size));
        return detail::taken(bytes, size);
    }
    std::string listens(std::size_t index = 0) const {
        char *text = nullptr;
        return check(xrail_worker_listens(get(), index, &text)) ? detail::taken(text) : std::string();
    }
    endpoint connect(const std::string &to, timeout limit = timeout::standard(), const char *require = nullptr) const {
        xrail_connect_options options;
        XRAIL_INIT(options);
        options.require = require;
        xrail_endpoint *made = nullptr;
        check(xrail_connect(get(), to.data(), to.size(), limit.us(), &options, &made));
        return endpoint(made);
    }
    endpoint accept(timeout limit = timeout::standard()) const {
        xrail_endpoint *made = nullptr;
        check(xrail_accept(get(), limit.us(), &made));
        return endpoint(made);
    }
    request recv(void *data, std::size_t size, std::uint64_t tag, std::uint64_t mask = XRAIL_ALL_BITS,
                 const endpoint *from = nullptr, const xrail_op_options *options = nullptr) const {
        xrail_request *made = nullptr;
        check(xrail_recv(get(), data, size, tag, mask, from ? from->get() : nullptr, options, &made));
        return request(made);
    }
    region register_memory(void *memory, std::size_t size, std::uint32_t device = XRAIL_CPU) const {
        xrail_region *made = nullptr;
        check(xrail_register(get(), memory, size, device, &made));
        return region(made);
    }
    std::string describe(const std::vector<const region *> &regions) const {
        std::vector<xrail_region *> handles;
        for (const region *one : regions) handles.push_back(one->get());
        void *bytes = nullptr;
        std::size_t size = 0;
        check(xrail_describe(get(), handles.data(), handles.size(), &bytes, &size));
        return detail::taken(bytes, size);
    }
    layout rows(const std::vector<xrail_row> &rows, const std::vector<const region *> &of) const {
        std::vector<xrail_region *> handles;
        for (const region *one : of) handles.push_back(one->get());
        xrail_layout *made = nullptr;
        check(xrail_layout_own(get(), rows.data(), rows.size(), handles.data(), handles.size(), &made));
        return layout(made);
    }
    /* At most `max`, oldest first; none if there are none. */
    std::vector<notice> take_notices(std::size_t max = 64) const {
        xrail_notice *first = nullptr;
        std::size_t count = 0;
        std::vector<notice> all;
        if (!check(xrail_take_notices(get(), max, &first, &count))) return all;
        std::unique_ptr<xrail_notice, detail::free_block> owned(first);
        for (std::size_t at = 0; at < count; at++)
            all.push_back({first[at].peer, std::string(static_cast<const char *>(first[at].data), first[at].size)});
        return all;
    }
    /* Waits until one of them is over; its place. */
    std::size_t wait_any(const std::vector<const request *> &requests, timeout limit = timeout::standard()) const {
        std::vector<xrail_request *> handles;
        for (const request *one : requests) handles.push_back(one->get());
        std::size_t index = 0;
        check(xrail_wait_any(handles.data(), handles.size(), limit.us(), &index));
        return index;
    }
    /* Ends requests, connections and threads; later calls throw CLOSED. */
    void close() const { check(xrail_worker_close(get())); }
    bool progress() const { return check(xrail_worker_progress(get())); }
    void wait(timeout limit = timeout::standard()) const { check(xrail_worker_wait(get(), limit.us())); }
    void interrupt() const noexcept { xrail_worker_interrupt(get()); }
    xrail_worker *get() const noexcept { return handle_.get(); }

private:
    detail::owned<xrail_worker, xrail_worker_free> handle_;
};

} // namespace crossrail
#endif
