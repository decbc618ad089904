// NCCL between processes of one machine, for the fake device: collectives run in stream order, exchange
// through files in /dev/shm, sum in the order of ranks, may be late (FAKE_NCCL_US, FAKE_NCCL_JITTER_US) and
// as slow as a link (FAKE_NCCL_MBPS: megabytes per second that a rank sends). Ranks may share a device.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <nccl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>
#define API extern "C" __attribute__((visibility("default")))
using Bytes = std::vector<char>;
struct ncclComm {
    std::string id;
    int rank, n, device = 0;
    std::atomic<uint64_t> launched{0}, turn{0};
    std::atomic<bool> aborted{false};
    std::map<int, uint64_t> sent, received;
    int splits = 0;
};
static long env(const char* n, long d) {
    const char* v = getenv(n);
    return v ? atol(v) : d;
}
static void us(long t) {
    if (t > 0) std::this_thread::sleep_for(std::chrono::microseconds(t));
}
struct OnLink {
    int fd = -1;
    explicit OnLink(int rank) {
        static const bool shared = getenv("FAKE_SHARED");
        if (!shared) return;
        static thread_local std::map<int, int> files;  // ranks of all jobs share their node's link
        int& f = files[rank];
        if (!f) {
            char n[40];
            snprintf(n, 40, "/dev/shm/fakelink-%d", rank);
            f = open(n, O_CREAT | O_RDWR, 0600);
        }
        fd = f;
        flock(fd, LOCK_EX);
    }
    ~OnLink() {
        if (fd >= 0) flock(fd, LOCK_UN);
    }
};
static void be_late(size_t bytes) {
    const long each = env("FAKE_NCCL_US", 0), most = env("FAKE_NCCL_JITTER_US", 0),
               rate = env("FAKE_NCCL_MBPS", 0);
    static thread_local std::mt19937 r{std::random_device{}()};
    us(each + (most > 0 ? (long)(r() % most) : 0) + (rate > 0 ? (long)(bytes / rate) : 0));
}
static std::string path(ncclComm* c, const std::string& what) {
    return "/dev/shm/fakenccl-" + c->id + "-" + what;
}
static void post(ncclComm* c, const std::string& what, const void* data, size_t size) {
    std::string to = path(c, what), tmp = to + ".new";
    int fd = open(tmp.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
    for (size_t done = 0; done < size;) {
        ssize_t k = write(fd, (const char*)data + done, size - done);
        if (k <= 0) {
            perror("fake nccl");
            abort();
        }
        done += k;
    }
    close(fd);
    rename(tmp.c_str(), to.c_str());
}
static bool fetch(ncclComm* c, const std::string& what, void* data, size_t from, size_t size) {
    std::string at = path(c, what);
    int fd;
    while ((fd = open(at.c_str(), O_RDONLY)) < 0) {
        if (c->aborted) return false;
        us(30);
    }
    struct stat s;
    fstat(fd, &s);
    if (size && (size_t)s.st_size < from + size) {
        fprintf(
            stderr,
            "fake nccl: rank %d reads %zu bytes from %zu of %zu: ranks do not call the same collective\n",
            c->rank, size, from, (size_t)s.st_size);
        abort();
    }
    for (size_t done = 0; done < size;) {
        ssize_t k = pread(fd, (char*)data + done, size - done, from + done);
        if (k <= 0) {
            perror("fake nccl");
            abort();
        }
        done += k;
    }
    close(fd);
    return true;
}
// ---- numbers
static size_t width(ncclDataType_t t) {
    static const size_t w[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return w[t];
}
static float bf(uint16_t v) {
    uint32_t u = (uint32_t)v << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static uint16_t bf(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if (std::isnan(f)) return 0x7fc0;
    return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
struct PreMul {
    double scalar;
};
static std::mutex g_m;
static std::map<int, PreMul> g_ops;
static int g_next = 16;
template <class T, class A>
static void fold(char* into, const std::vector<Bytes>& all, size_t count, int op, A (*get)(T), T (*put)(A)) {
    int n = all.size();
    double scale = 1;
    bool sum = op == ncclSum || op == ncclAvg || op >= 16;
    if (op == ncclAvg) scale = 1.0 / n;
    if (op >= 16) {
        std::lock_guard<std::mutex> l(g_m);
        scale = g_ops[op].scalar;
    }
    bool whole = std::is_integral<T>::value && !std::is_same<T, uint16_t>::value;
    A s = (A)scale;
    for (size_t i = 0; i < count; ++i) {
        A total = 0;
        for (int r = 0; r < n; ++r) {
            A v = get(((const T*)all[r].data())[i]);
            if (sum && scale != 1 && !whole) v = get(put(v * s));
            if (r == 0)
                total = v;
            else
                total = sum              ? get(put(total + v))
                        : op == ncclProd ? total * v
                        : op == ncclMax  ? std::max(total, v)
                                         : std::min(total, v);
        }
        if (op == ncclAvg && whole) total = total / n;
        ((T*)into)[i] = put(total);
    }
}
template <class T>
static T same(T v) {
    return v;
}
static float h2f(_Float16 v) { return v; }
static _Float16 f2h(float v) { return v; }
static void reduce(char* into, const std::vector<Bytes>& all, size_t count, ncclDataType_t t, int op) {
    switch (t) {
        case ncclInt8:
            fold<int8_t, int8_t>(into, all, count, op, same, same);
            break;
        case ncclUint8:
            fold<uint8_t, uint8_t>(into, all, count, op, same, same);
            break;
        case ncclInt32:
            fold<int32_t, int32_t>(into, all, count, op, same, same);
            break;
        case ncclUint32:
            fold<uint32_t, uint32_t>(into, all, count, op, same, same);
            break;
        case ncclInt64:
            fold<int64_t, int64_t>(into, all, count, op, same, same);
            break;
        case ncclUint64:
            fold<uint64_t, uint64_t>(into, all, count, op, same, same);
            break;
        case ncclFloat16:
            fold<_Float16, float>(into, all, count, op, h2f, f2h);
            break;
        case ncclFloat32:
            fold<float, float>(into, all, count, op, same, same);
            break;
        case ncclFloat64:
            fold<double, double>(into, all, count, op, same, same);
            break;
        case ncclBfloat16:
            fold<uint16_t, float>(into, all, count, op, bf, bf);
            break;
        default:
            fprintf(stderr, "fake nccl: data type %d\n", t);
            abort();
    }
}
// ---- launching
enum Kind { ALLREDUCE, REDUCE_SCATTER, ALLGATHER, BROADCAST, REDUCE, ALLTOALL, GATHER, SCATTER };
struct Call {
    ncclComm* c;
    std::function<bool()> run;
    uint64_t order;
    cudaStream_t s;
};
struct P2P {
    ncclComm* c;
    bool send;
    const void* data;
    void* into;
    size_t bytes;
    int peer;
    cudaStream_t s;
    uint64_t nr;
};
static thread_local int tl_depth = 0;
static thread_local std::vector<P2P> tl_p2p;
static void enqueue(ncclComm* c, cudaStream_t s, std::function<bool()> f) {
    auto* call = new Call{c, std::move(f), c->launched++, s};
    cudaLaunchHostFunc(
        s,
        [](void* p) {
            std::unique_ptr<Call> k((Call*)p);
            while (k->c->turn != k->order && !k->c->aborted) us(20);
            if (!k->c->aborted) k->run();
            ++k->c->turn;
        },
        call);
}
static ncclResult_t collective(
    Kind kind, const void* send, void* recv, size_t count, ncclDataType_t t, int op, int root, ncclComm* c,
    cudaStream_t s) {
    if (getenv("FAKE_TRACE"))
        fprintf(stderr, "nccl %d rank %d of %d count %zu type %d\n", kind, c->rank, c->n, count, t);
    uint64_t nr = c->launched;
    size_t b = count * width(t);
    int n = c->n, me = c->rank;
    enqueue(c, s, [=]() -> bool {
        size_t out = kind == REDUCE_SCATTER || kind == ALLTOALL || (kind == SCATTER && me == root) ? b * n
                     : (kind == BROADCAST && me != root) || kind == SCATTER                        ? 0
                                                                                                   : b;
        if (n > 1) {
            OnLink link(me);
            be_late(
                kind == ALLREDUCE                             ? 2 * b * (n - 1) / n
                : kind == REDUCE_SCATTER || kind == ALLGATHER ? b * (n - 1)
                                                              : b);
        }
        auto name = [&](uint64_t k, int r) { return std::to_string(k) + "-" + std::to_string(r); };
        post(c, name(nr, me), send, out);
        std::vector<Bytes> all(n);
        for (int r = 0; r < n; ++r) {
            size_t from = 0, size = 0;
            if (kind == ALLREDUCE || (kind == REDUCE && me == root))
                size = b;
            else if (kind == REDUCE_SCATTER) {
                size = b;
                from = me * b;
            } else if (kind == ALLTOALL) {
                size = b;
                from = me * b;
            } else if (kind == ALLGATHER || (kind == GATHER && me == root))
                size = b;
            else if (kind == BROADCAST && r == root)
                size = b;
            else if (kind == SCATTER && r == root) {
                size = b;
                from = me * b;
            }
            all[r].resize(size);
            if (!fetch(c, name(nr, r), all[r].data(), from, size)) return false;
        }
        if (kind == ALLREDUCE || kind == REDUCE_SCATTER || (kind == REDUCE && me == root))
            reduce((char*)recv, all, count, t, op);
        else if (kind == ALLGATHER || kind == ALLTOALL || (kind == GATHER && me == root))
            for (int r = 0; r < n; ++r) memcpy((char*)recv + r * b, all[r].data(), b);
        else if (kind == BROADCAST || kind == SCATTER)
            memcpy(recv, all[root].data(), b);
        if (nr > 0)
            unlink(path(c, name(nr - 1, me))
                       .c_str());  // all have finished what came before: they have posted this one
        return true;
    });
    return ncclSuccess;
}
static void flush_p2p() {
    std::map<std::pair<ncclComm*, cudaStream_t>, std::vector<P2P>> groups;
    for (auto& p : tl_p2p) groups[{p.c, p.s}].push_back(p);
    tl_p2p.clear();
    for (auto& [key, calls] : groups) {
        auto list = calls;
        ncclComm* c = key.first;
        enqueue(c, key.second, [=]() -> bool {
            for (auto& p : list)
                if (p.send) {
                    be_late(p.bytes);
                    post(
                        c,
                        "p" + std::to_string(c->rank) + "-" + std::to_string(p.peer) + "-" +
                            std::to_string(p.nr),
                        p.data, p.bytes);
                }
            for (auto& p : list)
                if (!p.send) {
                    auto w = "p" + std::to_string(p.peer) + "-" + std::to_string(c->rank) + "-" +
                             std::to_string(p.nr);
                    if (!fetch(c, w, p.into, 0, p.bytes)) return false;
                    unlink(path(c, w).c_str());
                }
            return true;
        });
    }
}
// ---- NCCL's names
API ncclResult_t ncclGetVersion(int* v) {
    *v = NCCL_VERSION_CODE;
    return ncclSuccess;
}
API ncclResult_t ncclGetUniqueId(ncclUniqueId* u) {
    memset(u, 0, sizeof *u);
    snprintf(u->internal, 64, "%d-%08x", getpid(), std::random_device{}());
    return ncclSuccess;
}
API ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int n, ncclUniqueId id, int rank, ncclConfig_t*) {
    auto* c = new ncclComm;
    c->id = id.internal;
    c->rank = rank;
    c->n = n;
    *out = c;
    cudaFree(nullptr);
    cudaGetDevice(&c->device);
    post(c, "join-" + std::to_string(rank), "", 0);
    for (int r = 0; r < n; ++r) fetch(c, "join-" + std::to_string(r), nullptr, 0, 0);
    return ncclSuccess;
}
API ncclResult_t ncclCommInitRank(ncclComm_t* c, int n, ncclUniqueId id, int r) {
    return ncclCommInitRankConfig(c, n, id, r, nullptr);
}
API ncclResult_t
ncclCommInitRankScalable(ncclComm_t* c, int n, int r, int, ncclUniqueId* ids, ncclConfig_t* f) {
    return ncclCommInitRankConfig(c, n, ids[0], r, f);
}
API ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t* out, ncclConfig_t*) {
    int k = c->splits++, mine[2] = {color, key};
    std::string tag = "split" + std::to_string(k) + "-";
    post(c, tag + std::to_string(c->rank), mine, sizeof mine);
    std::vector<std::pair<int, int>> members;
    for (int r = 0; r < c->n; ++r) {
        int his[2];
        fetch(c, tag + std::to_string(r), his, 0, sizeof his);
        if (his[0] == color) members.push_back({his[1], r});
    }
    *out = nullptr;
    if (color < 0) return ncclSuccess;
    std::sort(members.begin(), members.end());
    auto* d = new ncclComm;
    d->id = c->id + "." + std::to_string(k) + "." + std::to_string(color);
    d->n = members.size();
    for (int i = 0; i < d->n; ++i)
        if (members[i].second == c->rank) d->rank = i;
    *out = d;
    return ncclSuccess;
}
API ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
API ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }
API ncclResult_t ncclCommAbort(ncclComm_t c) {
    c->aborted = true;
    return ncclSuccess;
}
API ncclResult_t ncclCommRevoke(ncclComm_t c, int) {
    c->aborted = true;
    return ncclSuccess;
}
API ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* e) {
    *e = ncclSuccess;
    return ncclSuccess;
}
API ncclResult_t ncclCommCount(const ncclComm_t c, int* n) {
    *n = c->n;
    return ncclSuccess;
}
API ncclResult_t ncclCommUserRank(const ncclComm_t c, int* r) {
    *r = c->rank;
    return ncclSuccess;
}
API ncclResult_t ncclCommCuDevice(const ncclComm_t c, int* d) {
    *d = c->device;
    return ncclSuccess;
}
API const char* ncclGetErrorString(ncclResult_t) { return "fake nccl error"; }
API const char* ncclGetLastError(ncclComm_t) { return ""; }
API ncclResult_t ncclMemAlloc(void** p, size_t n) {
    return cudaMalloc(p, n) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
API ncclResult_t ncclMemFree(void* p) {
    cudaFree(p);
    return ncclSuccess;
}
API ncclResult_t ncclCommRegister(const ncclComm_t, void*, size_t, void** h) {
    *h = nullptr;
    return ncclSuccess;
}
API ncclResult_t ncclCommDeregister(const ncclComm_t, void*) { return ncclSuccess; }
API ncclResult_t
ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t t, ncclScalarResidence_t, ncclComm_t) {
    double v = t == ncclFloat32    ? *(float*)scalar
               : t == ncclFloat64  ? *(double*)scalar
               : t == ncclFloat16  ? (double)(float)*(_Float16*)scalar
               : t == ncclBfloat16 ? bf(*(uint16_t*)scalar)
                                   : *(int*)scalar;
    std::lock_guard<std::mutex> l(g_m);
    g_ops[g_next] = {v};
    *op = (ncclRedOp_t)g_next++;
    return ncclSuccess;
}
API ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }
API ncclResult_t ncclAllReduce(
    const void* a, void* b, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
    return collective(ALLREDUCE, a, b, n, t, op, 0, c, s);
}
API ncclResult_t ncclReduceScatter(
    const void* a, void* b, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
    return collective(REDUCE_SCATTER, a, b, n, t, op, 0, c, s);
}
API ncclResult_t
ncclAllGather(const void* a, void* b, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
    return collective(ALLGATHER, a, b, n, t, 0, 0, c, s);
}
API ncclResult_t
ncclBroadcast(const void* a, void* b, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
    return collective(BROADCAST, a, b, n, t, 0, root, c, s);
}
API ncclResult_t ncclBcast(void* b, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
    return collective(BROADCAST, b, b, n, t, 0, root, c, s);
}
API ncclResult_t ncclReduce(
    const void* a, void* b, size_t n, ncclDataType_t t, ncclRedOp_t op, int root, ncclComm_t c,
    cudaStream_t s) {
    return collective(REDUCE, a, b, n, t, op, root, c, s);
}
API ncclResult_t
ncclAlltoAll(const void* a, void* b, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
    return collective(ALLTOALL, a, b, n, t, 0, 0, c, s);
}
API ncclResult_t
ncclGather(const void* a, void* b, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
    return collective(GATHER, a, b, n, t, 0, root, c, s);
}
API ncclResult_t
ncclScatter(const void* a, void* b, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
    return collective(SCATTER, a, b, n, t, 0, root, c, s);
}
API ncclResult_t ncclSend(const void* a, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
    tl_p2p.push_back({c, true, a, nullptr, n * width(t), peer, s, c->sent[peer]++});
    if (!tl_depth) flush_p2p();
    return ncclSuccess;
}
API ncclResult_t ncclRecv(void* b, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
    tl_p2p.push_back({c, false, nullptr, b, n * width(t), peer, s, c->received[peer]++});
    if (!tl_depth) flush_p2p();
    return ncclSuccess;
}
API ncclResult_t ncclGroupStart() {
    ++tl_depth;
    return ncclSuccess;
}
API ncclResult_t ncclGroupEnd() {
    if (--tl_depth == 0) flush_p2p();
    return ncclSuccess;
}
