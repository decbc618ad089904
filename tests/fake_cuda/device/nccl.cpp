// NCCL between processes of one machine. Collectives run in stream order, exchange files in
// /dev/shm and sum in the order of ranks. FAKE_NCCL_MBPS is the speed of the link, in megabytes per
// second that a rank sends. Ranks may share a device.
#include <nccl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "fake.h"

using Bytes = std::vector<char>;
constexpr long POLL_US = 30;

struct ncclComm {
    std::string id;
    int rank, count, device = 0;
    std::atomic<uint64_t> launched{0}, done{0};  // calls run one after the other, on any streams
    std::atomic<bool> aborted{false};
    std::map<int, uint64_t> sent, received;
    int splits = 0;
    std::mutex mutex;
    std::vector<std::string> left;  // files of this rank that a peer may still read
};

[[noreturn]] static void die(const std::string& why) {
    fprintf(stderr, "fake NCCL: %s\n", why.c_str());
    abort();
}
static std::string path(const ncclComm* c, const std::string& what) { return "/dev/shm/fakenccl-" + c->id + "-" + what; }

static void post(ncclComm* c, const std::string& what, const void* data, size_t size) {
    const std::string to = path(c, what), unfinished = to + ".new";
    const int file = open(unfinished.c_str(), O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
    if (file < 0) die("cannot write " + unfinished + ": " + strerror(errno));
    for (size_t done = 0; done < size;) {
        const ssize_t written = write(file, (const char*)data + done, size - done);
        if (written <= 0) die("cannot write " + unfinished + ": " + strerror(errno));
        done += written;
    }
    close(file);
    rename(unfinished.c_str(), to.c_str());
}
static bool fetch(ncclComm* c, const std::string& what, void* data, size_t from, size_t size) {
    const std::string at = path(c, what);
    int file;
    while ((file = open(at.c_str(), O_RDONLY | O_CLOEXEC)) < 0) {
        if (c->aborted) return false;
        fake_sleep_us(POLL_US);
    }
    struct stat found;
    fstat(file, &found);
    if (size && (size_t)found.st_size < from + size)
        die("rank " + std::to_string(c->rank) + " expects " + std::to_string(from + size) + " bytes, got " +
            std::to_string(found.st_size) + "; ranks do not call the same collective");
    for (size_t done = 0; done < size;) {
        const ssize_t got = pread(file, (char*)data + done, size - done, from + done);
        if (got <= 0) die("cannot read " + at + ": " + strerror(errno));
        done += got;
    }
    close(file);
    return true;
}
// Removes this rank's files except the latest. All ranks have read the others: they have posted
// their parts of the next collective.
static void posted(ncclComm* c, const std::string& what) {
    std::lock_guard lock(c->mutex);
    for (const std::string& each : c->left) unlink(path(c, each).c_str());
    c->left = {what};
}

// ---- numbers
static size_t width(ncclDataType_t type) {
    static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return widths[type];
}
static float from_bf16(uint16_t value) {
    const uint32_t bits = (uint32_t)value << 16;
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}
static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return std::isnan(value) ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
constexpr int FIRST_OWN_OP = 16;
static std::mutex g_ops_mutex;
static std::map<int, double> g_ops;  // factors of inputs, which are multiplied before the sum
static int g_next_op = FIRST_OWN_OP;

static double scale_of(int op, int ranks) {
    if (op == ncclAvg) return 1.0 / ranks;
    if (op < FIRST_OWN_OP) return 1;
    std::lock_guard lock(g_ops_mutex);
    return g_ops.at(op);
}
// `get` converts a stored number to the type of the arithmetic. `put` rounds a result back. Each
// operation is rounded.
template <class Stored, class Number>
static void fold(
    char* into, const std::vector<Bytes>& all, size_t count, int op, Number (*get)(Stored), Stored (*put)(Number)) {
    constexpr bool whole = std::is_integral_v<Number>;
    const bool sum = op == ncclSum || op == ncclAvg || op >= FIRST_OWN_OP;
    const double scale = scale_of(op, (int)all.size());
    for (size_t i = 0; i < count; ++i) {
        Number total = 0;
        for (size_t rank = 0; rank < all.size(); ++rank) {
            Number value = get(((const Stored*)all[rank].data())[i]);
            if (sum && scale != 1 && !whole) value = get(put(value * (Number)scale));
            if (rank == 0) total = value;
            else if (sum) total = get(put(total + value));
            else if (op == ncclProd) total = get(put(total * value));
            else total = op == ncclMax ? std::max(total, value) : std::min(total, value);
        }
        if (op == ncclAvg && whole) total = total / (Number)all.size();
        ((Stored*)into)[i] = put(total);
    }
}
template <class T>
static T same(T value) {
    return value;
}
static float from_half(_Float16 value) { return value; }
static _Float16 to_half(float value) { return value; }
static void reduce(char* into, const std::vector<Bytes>& all, size_t count, ncclDataType_t type, int op) {
    switch (type) {
        case ncclInt8: return fold<int8_t, int8_t>(into, all, count, op, same, same);
        case ncclUint8: return fold<uint8_t, uint8_t>(into, all, count, op, same, same);
        case ncclInt32: return fold<int32_t, int32_t>(into, all, count, op, same, same);
        case ncclUint32: return fold<uint32_t, uint32_t>(into, all, count, op, same, same);
        case ncclInt64: return fold<int64_t, int64_t>(into, all, count, op, same, same);
        case ncclUint64: return fold<uint64_t, uint64_t>(into, all, count, op, same, same);
        case ncclFloat16: return fold<_Float16, float>(into, all, count, op, from_half, to_half);
        case ncclFloat32: return fold<float, float>(into, all, count, op, same, same);
        case ncclFloat64: return fold<double, double>(into, all, count, op, same, same);
        case ncclBfloat16: return fold<uint16_t, float>(into, all, count, op, from_bf16, to_bf16);
        default: die("no arithmetic for data type " + std::to_string(type));
    }
}

// ---- launching
struct Call {
    ncclComm* comm;
    uint64_t number;
    std::function<void(uint64_t)> run;
};
static ncclResult_t enqueue(ncclComm* c, cudaStream_t stream, std::function<void(uint64_t)> run) {
    cudaStreamCaptureStatus status;
    if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) return ncclUnhandledCudaError;
    if (status != cudaStreamCaptureStatusNone) {
        fake_not_covered("NCCL in a graph");
        return ncclUnhandledCudaError;
    }
    auto* call = new Call{c, c->launched++, std::move(run)};
    const auto in_turn = [](void* data) {
        const auto& call = *(Call*)data;
        while (call.comm->done != call.number && !call.comm->aborted) fake_sleep_us(POLL_US);
        if (!call.comm->aborted) call.run(call.number);
        ++call.comm->done;
    };
    const auto drop = [](void* data) { delete (Call*)data; };
    return fake_launch(stream, in_turn, drop, call) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
static long on_wire_us(size_t bytes) {
    const long rate = fake::knob("FAKE_NCCL_MBPS");
    return rate > 0 ? (long)(bytes / rate) : 0;
}

enum Kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, ALL_TO_ALL, GATHER, SCATTER };
struct Collective {
    Kind kind;
    const void* send;
    void* receive;
    size_t count;
    ncclDataType_t type;
    int op, root;
    ncclComm* comm;

    size_t bytes() const { return count * width(type); }
    bool is_root() const { return comm->rank == root; }
    size_t posted_bytes() const {
        const bool all_parts = kind == REDUCE_SCATTER || kind == ALL_TO_ALL;
        if (all_parts || (kind == SCATTER && is_root())) return bytes() * comm->count;
        return kind == SCATTER || (kind == BROADCAST && !is_root()) ? 0 : bytes();
    }
    size_t sent_bytes() const {
        const size_t peers = comm->count - 1;
        if (kind == ALL_REDUCE) return 2 * bytes() * peers / comm->count;
        return kind == REDUCE_SCATTER || kind == ALL_GATHER ? bytes() * peers : bytes();
    }
    // Whether it reads the file of a rank.
    bool reads(int rank) const {
        if (kind == BROADCAST || kind == SCATTER) return rank == root;
        return (kind != REDUCE && kind != GATHER) || is_root();
    }
    void run(uint64_t number, long late_us) const {
        if (comm->count > 1) {
            const fake::Alone on_link("link", comm->rank);
            fake_sleep_us(late_us + on_wire_us(sent_bytes()));
        }
        const auto name = [&](int rank) { return std::to_string(number) + "-" + std::to_string(rank); };
        post(comm, name(comm->rank), send, posted_bytes());
        const bool own_part = kind == REDUCE_SCATTER || kind == ALL_TO_ALL || kind == SCATTER;
        std::vector<Bytes> all(comm->count);
        for (int rank = 0; rank < comm->count; ++rank) {
            all[rank].resize(reads(rank) ? bytes() : 0);
            const size_t from = own_part ? comm->rank * bytes() : 0;
            if (!fetch(comm, name(rank), all[rank].data(), from, all[rank].size())) return;
        }
        write(all);
        posted(comm, name(comm->rank));
    }
    void write(const std::vector<Bytes>& all) const {
        if ((kind == REDUCE || kind == GATHER) && !is_root()) return;
        if (kind == BROADCAST || kind == SCATTER) {
            memcpy(receive, all[root].data(), bytes());
        } else if (kind == ALL_REDUCE || kind == REDUCE_SCATTER || kind == REDUCE) {
            reduce((char*)receive, all, count, type, op);
        } else {
            for (size_t rank = 0; rank < all.size(); ++rank)
                memcpy((char*)receive + rank * bytes(), all[rank].data(), bytes());
        }
    }
};
static ncclResult_t start(const Collective& call, cudaStream_t stream) {
    if (call.type > ncclBfloat16) {
        fake_not_covered("NCCL with eight-bit floating types");
        return ncclInvalidArgument;
    }
    if (getenv("FAKE_TRACE"))
        fprintf(
            stderr, "fake NCCL: collective %d, rank %d of %d, %zu numbers of type %d\n", call.kind, call.comm->rank,
            call.comm->count, call.count, call.type);
    const long late_us = fake_lateness_us("NCCL", stream);
    return enqueue(call.comm, stream, [=](uint64_t number) { call.run(number, late_us); });
}

// ---- messages
struct Message {
    ncclComm* comm;
    bool send;
    const void* data;
    void* into;
    size_t bytes;
    int peer;
    cudaStream_t stream;
    uint64_t number;

    std::string name() const {
        const int from = send ? comm->rank : peer, to = send ? peer : comm->rank;
        return "p" + std::to_string(from) + "-" + std::to_string(to) + "-" + std::to_string(number);
    }
};
static thread_local int tl_depth = 0;
static thread_local std::vector<Message> tl_messages;

static void exchange(const std::vector<Message>& messages, long late_us) {
    for (const Message& each : messages) {
        if (!each.send) continue;
        fake_sleep_us(late_us + on_wire_us(each.bytes));
        post(each.comm, each.name(), each.data, each.bytes);
    }
    for (const Message& each : messages) {
        if (each.send) continue;
        if (!fetch(each.comm, each.name(), each.into, 0, each.bytes)) return;
        unlink(path(each.comm, each.name()).c_str());
    }
}
static ncclResult_t start_messages() {
    std::map<std::pair<ncclComm*, cudaStream_t>, std::vector<Message>> groups;
    for (const Message& each : tl_messages) groups[{each.comm, each.stream}].push_back(each);
    tl_messages.clear();
    for (const auto& [where, messages] : groups) {
        const long late_us = fake_lateness_us("NCCL", where.second);
        const ncclResult_t result =
            enqueue(where.first, where.second, [messages = messages, late_us](uint64_t) { exchange(messages, late_us); });
        if (result != ncclSuccess) return result;
    }
    return ncclSuccess;
}
static ncclResult_t add(const Message& message) {
    tl_messages.push_back(message);
    return tl_depth ? ncclSuccess : start_messages();
}

// ---- communicators
// The last rank to leave removes all files: until then a slow rank may have to read them.
static void leave(ncclComm* c) {
    post(c, "left-" + std::to_string(c->rank), "", 0);
    for (int rank = 0; rank < c->count; ++rank)
        if (access(path(c, "left-" + std::to_string(rank)).c_str(), F_OK)) return;
    fake_remove_shared(("fakenccl-" + c->id + "-").c_str());
}
API ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
API ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    fake_sweep();
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%d-%08x", getpid(), std::random_device{}());
    return ncclSuccess;
}
API ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int count, ncclUniqueId id, int rank, ncclConfig_t*) {
    if (cudaFree(nullptr) != cudaSuccess) return ncclUnhandledCudaError;
    auto* c = new ncclComm;
    c->id = id.internal;
    c->rank = rank;
    c->count = count;
    cudaGetDevice(&c->device);
    const std::string own = "join-" + std::to_string(rank);
    post(c, own, "", 0);
    for (int peer = 0; peer < count; ++peer) fetch(c, "join-" + std::to_string(peer), nullptr, 0, 0);
    posted(c, own);
    *out = c;
    return ncclSuccess;
}
API ncclResult_t ncclCommInitRank(ncclComm_t* out, int count, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(out, count, id, rank, nullptr);
}
API ncclResult_t ncclCommInitRankScalable(
    ncclComm_t* out, int count, int rank, int, ncclUniqueId* ids, ncclConfig_t* config) {
    return ncclCommInitRankConfig(out, count, ids[0], rank, config);
}
API ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t* out, ncclConfig_t*) {
    const int nth = c->splits++, mine[2] = {color, key};
    const auto name = [&](int rank) { return "split" + std::to_string(nth) + "-" + std::to_string(rank); };
    post(c, name(c->rank), mine, sizeof mine);
    std::vector<std::pair<int, int>> members;
    for (int rank = 0; rank < c->count; ++rank) {
        int theirs[2];
        fetch(c, name(rank), theirs, 0, sizeof theirs);
        if (theirs[0] == color) members.emplace_back(theirs[1], rank);
    }
    {
        std::lock_guard lock(c->mutex);
        c->left.push_back(name(c->rank));
    }
    *out = nullptr;
    if (color < 0) return ncclSuccess;
    std::sort(members.begin(), members.end());
    auto* part = new ncclComm;
    part->id = c->id + "." + std::to_string(nth) + "." + std::to_string(color);
    part->count = (int)members.size();
    for (int i = 0; i < part->count; ++i)
        if (members[i].second == c->rank) part->rank = i;
    *out = part;
    return ncclSuccess;
}
API ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
API ncclResult_t ncclCommDestroy(ncclComm_t c) {
    leave(c);
    return ncclSuccess;
}
API ncclResult_t ncclCommAbort(ncclComm_t c) {
    c->aborted = true;
    leave(c);
    return ncclSuccess;
}
API ncclResult_t ncclCommRevoke(ncclComm_t c, int) {
    c->aborted = true;
    return ncclSuccess;
}
API ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
    *error = ncclSuccess;
    return ncclSuccess;
}
API ncclResult_t ncclCommCount(const ncclComm_t c, int* count) {
    *count = c->count;
    return ncclSuccess;
}
API ncclResult_t ncclCommUserRank(const ncclComm_t c, int* rank) {
    *rank = c->rank;
    return ncclSuccess;
}
API ncclResult_t ncclCommCuDevice(const ncclComm_t c, int* device) {
    *device = c->device;
    return ncclSuccess;
}
API const char* ncclGetErrorString(ncclResult_t) { return "fake NCCL error"; }
API const char* ncclGetLastError(ncclComm_t) { return cudaGetErrorString(cudaPeekAtLastError()); }
API ncclResult_t ncclMemAlloc(void** out, size_t size) {
    return cudaMalloc(out, size) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
API ncclResult_t ncclMemFree(void* memory) {
    return cudaFree(memory) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
API ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** handle) {
    *handle = nullptr;
    return ncclSuccess;
}
API ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
API ncclResult_t ncclRedOpCreatePreMulSum(
    ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t residence, ncclComm_t) {
    if (residence != ncclScalarHostImmediate) {
        fake_not_covered("NCCL's sums with a factor on the device");
        return ncclInvalidArgument;
    }
    double value;
    switch (type) {
        case ncclFloat16: value = (float)*(_Float16*)scalar; break;
        case ncclBfloat16: value = from_bf16(*(uint16_t*)scalar); break;
        case ncclFloat32: value = *(float*)scalar; break;
        case ncclFloat64: value = *(double*)scalar; break;
        default: fake_not_covered("NCCL's sums with a whole factor"); return ncclInvalidArgument;
    }
    std::lock_guard lock(g_ops_mutex);
    g_ops[g_next_op] = value;
    *op = (ncclRedOp_t)g_next_op++;
    return ncclSuccess;
}
API ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

// ---- collectives
#define STREAM cudaStream_t stream
API ncclResult_t ncclAllReduce(
    const void* from, void* to, size_t n, ncclDataType_t type, ncclRedOp_t op, ncclComm_t c, STREAM) {
    return start({ALL_REDUCE, from, to, n, type, op, 0, c}, stream);
}
API ncclResult_t ncclReduceScatter(
    const void* from, void* to, size_t n, ncclDataType_t type, ncclRedOp_t op, ncclComm_t c, STREAM) {
    return start({REDUCE_SCATTER, from, to, n, type, op, 0, c}, stream);
}
API ncclResult_t ncclAllGather(
    const void* from, void* to, size_t n, ncclDataType_t type, ncclComm_t c, STREAM) {
    return start({ALL_GATHER, from, to, n, type, 0, 0, c}, stream);
}
API ncclResult_t ncclBroadcast(
    const void* from, void* to, size_t n, ncclDataType_t type, int root, ncclComm_t c, STREAM) {
    return start({BROADCAST, from, to, n, type, 0, root, c}, stream);
}
API ncclResult_t ncclBcast(void* both, size_t n, ncclDataType_t type, int root, ncclComm_t c, STREAM) {
    return start({BROADCAST, both, both, n, type, 0, root, c}, stream);
}
API ncclResult_t ncclReduce(
    const void* from, void* to, size_t n, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t c, STREAM) {
    return start({REDUCE, from, to, n, type, op, root, c}, stream);
}
API ncclResult_t ncclAlltoAll(const void* from, void* to, size_t n, ncclDataType_t type, ncclComm_t c, STREAM) {
    return start({ALL_TO_ALL, from, to, n, type, 0, 0, c}, stream);
}
API ncclResult_t ncclGather(
    const void* from, void* to, size_t n, ncclDataType_t type, int root, ncclComm_t c, STREAM) {
    return start({GATHER, from, to, n, type, 0, root, c}, stream);
}
API ncclResult_t ncclScatter(
    const void* from, void* to, size_t n, ncclDataType_t type, int root, ncclComm_t c, STREAM) {
    return start({SCATTER, from, to, n, type, 0, root, c}, stream);
}
API ncclResult_t ncclSend(const void* from, size_t n, ncclDataType_t type, int peer, ncclComm_t c, STREAM) {
    return add({c, true, from, nullptr, n * width(type), peer, stream, c->sent[peer]++});
}
API ncclResult_t ncclRecv(void* to, size_t n, ncclDataType_t type, int peer, ncclComm_t c, STREAM) {
    return add({c, false, nullptr, to, n * width(type), peer, stream, c->received[peer]++});
}
API ncclResult_t ncclGroupStart() {
    ++tl_depth;
    return ncclSuccess;
}
API ncclResult_t ncclGroupEnd() { return --tl_depth == 0 ? start_messages() : ncclSuccess; }
