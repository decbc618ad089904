// Kernels of the fake device: an operator on "cuda" tensors is enqueued on the current stream and computed
// there by the CPU's kernel, on CPU tensors over the same memory. Arguments are kept as raw memory, as a real
// kernel keeps them, so a tensor that is freed or overwritten too early gives wrong numbers here too. What
// the CPU cannot compute raises.
#include <cmath>
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/file.h>
#include <torch/library.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <random>
#include <thread>
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

static long env(const char* name, long otherwise) {
    const char* v = getenv(name);
    return v ? atol(v) : otherwise;
}
static void be_late() {
    const long each = env("FAKE_KERNEL_US", 0),
               most = env("FAKE_KERNEL_JITTER_US", 0);  // read each time: a test may change them
    static thread_local std::mt19937 random{std::random_device{}()};
    long t = each + (most > 0 ? (long)(random() % most) : 0);
    if (t > 0) std::this_thread::sleep_for(std::chrono::microseconds(t));
}
extern "C" {
int PyGILState_Ensure();
void PyGILState_Release(int);
void PyErr_Clear();
}
static void forget_python_error() {
    int g = PyGILState_Ensure();
    PyErr_Clear();
    PyGILState_Release(g);
}  // a shape function in Python left one
// One kernel at a time on a device, whatever process it is of, as under time slicing: FAKE_SHARED=1.
struct OnDevice {
    int fd = -1;
    explicit OnDevice(int device) {
        static const bool shared = getenv("FAKE_SHARED");
        if (!shared) return;
        static thread_local std::map<int, int> files;
        int& f = files[device];
        if (!f) {
            char n[40];
            snprintf(n, 40, "/dev/shm/fakegpu-%d", device);
            f = open(n, O_CREAT | O_RDWR, 0600);
        }
        fd = f;
        flock(fd, LOCK_EX);
    }
    ~OnDevice() {
        if (fd >= 0) flock(fd, LOCK_UN);
    }
};
static bool tracing() {
    static const bool on = getenv("FAKE_TRACE");
    return on;
}

// ---- arguments
template <class F>
static IValue each_tensor(const IValue& v, F&& f) {
    if (v.isTensor()) return f(v.toTensor());
    if (v.isTensorList()) {
        c10::List<at::Tensor> out;
        for (const at::Tensor& t : v.toTensorVector()) out.push_back(f(t));
        return out;
    }
    if (v.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> out;
        for (std::optional<at::Tensor> t : v.toOptionalTensorList())
            out.push_back(t ? std::optional<at::Tensor>(f(*t)) : t);
        return out;
    }
    if (v.isGenerator()) return IValue();
    if (v.isDevice()) return v;
    return v;
}
static at::Tensor on_cpu(const at::Tensor& t) {
    if (!t.defined()) return t;
    if (!t.is_cuda()) return t.unsafeGetTensorImpl()->is_wrapped_number() ? t : t.clone();
    auto o = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
    at::Tensor a = t.numel() ? at::from_blob(t.data_ptr(), t.sizes(), t.strides(), o)
                             : at::empty_strided(t.sizes(), t.strides(), o);
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) a.unsafeGetTensorImpl()->set_wrapped_number(true);
    return a;
}
static at::Tensor on_meta(const at::Tensor& t) {
    if (!t.defined() || !t.is_cuda()) return t;
    return at::empty_strided(t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(at::kMeta));
}
static Stack convert(const Stack& all, size_t from, at::Tensor (*f)(const at::Tensor&), bool cpu) {
    Stack out;
    for (size_t i = from; i < all.size(); ++i)
        out.push_back(
            all[i].isDevice() ? IValue(c10::Device(cpu ? at::kCPU : at::kMeta)) : each_tensor(all[i], f));
    return out;
}
// ---- launching
struct Launch {
    OperatorHandle op;
    Stack args;
    Stack outs;
    int device;
};  // outs: CPU aliases that a functional operator's results go to
static void copy_into(const IValue& to, const IValue& from) {
    if (to.isTensor()) {
        if (!to.toTensor().defined()) return;
        if (from.toTensor().numel() || !to.toTensor().numel()) to.toTensor().copy_(from.toTensor());
        else to.toTensor().fill_(NAN);  // the CPU leaves it out, as statistics in evaluation: not to be read
    } else if (to.isTensorList()) {
        auto a = to.toTensorVector(), b = from.toTensorVector();
        for (size_t i = 0; i < a.size(); ++i) a[i].copy_(b[i]);
    }
}
static void run(void* p) {
    std::unique_ptr<Launch> l((Launch*)p);
    static thread_local bool once = (at::set_num_threads(1), true);
    (void)once;
    OnDevice alone(l->device);
    be_late();
    try {
        at::AutoDispatchBelowADInplaceOrView guard;
        l->op.callBoxed(&l->args);
        for (size_t i = 0; i < l->outs.size(); ++i) copy_into(l->outs[i], l->args[i]);
    } catch (const std::exception& e) {
        fprintf(
            stderr, "fake device: %s failed in its stream: %s\n",
            c10::toString(l->op.operator_name()).c_str(), e.what());
        abort();
    }
}
static void enqueue(Launch* l) {
    auto s = c10::cuda::getCurrentCUDAStream().stream();
    TORCH_CHECK(cudaLaunchHostFunc(s, run, l) == cudaSuccess);
}
static void sync_stream() { cudaStreamSynchronize(c10::cuda::getCurrentCUDAStream().stream()); }
static bool has_cpu(const OperatorHandle& op) {
    return op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
}
static at::Tensor like_on_cuda(const at::Tensor& m) {
    return m.defined() ? at::empty_strided(
                             m.sizes(), m.strides(), at::TensorOptions().dtype(m.dtype()).device(at::kCUDA))
                       : m;
}

static std::optional<c10::Device> device_of(const Stack& all, size_t from) {
    std::optional<c10::Device> found;
    for (size_t i = from; i < all.size() && !found; ++i) {
        each_tensor(all[i], [&](const at::Tensor& t) {
            if (!found && t.defined() && t.is_cuda()) found = t.device();
            return t;
        });
        if (!found && all[i].isDevice() && all[i].toDevice().is_cuda() && all[i].toDevice().has_index())
            found = all[i].toDevice();
    }
    return found;
}
static void kernel(const OperatorHandle& op, Stack* stack) {
    const auto& schema = op.schema();
    const size_t n = schema.arguments().size(), from = stack->size() - n;
    c10::cuda::OptionalCUDAGuard on_device;
    if (auto d = device_of(*stack, from)) on_device.set_device(*d);
    TORCH_CHECK_NOT_IMPLEMENTED(has_cpu(op), "fake device: no CPU kernel for ", op.operator_name());
    if (tracing()) std::cerr << "op " << op.operator_name() << "\n";
    std::vector<size_t> written;
    bool out_argument = false;
    for (size_t i = 0; i < n; ++i) {
        auto* a = schema.arguments()[i].alias_info();
        if (a && a->isWrite()) {
            written.push_back(i);
            out_argument |= schema.arguments()[i].is_out();
        }
    }
    bool functional = false,
         plain = true;  // functional: some result is no argument; plain: results are tensors
    for (auto& r : schema.returns()) {
        bool aliased = r.alias_info() && r.alias_info()->isWrite();
        functional |= !aliased;
        plain &= aliased || r.type()->isSubtypeOf(*c10::TensorType::get()) ||
                 r.type()->isSubtypeOf(*c10::ListType::ofTensors());
    }
    Stack results;
    bool late = plain;
    if (late && (functional || out_argument)) {  // shapes first
        Stack meta = convert(*stack, from, on_meta, false);
        Stack handed = meta;
        try {
            at::AutoDispatchBelowADInplaceOrView guard;
            op.callBoxed(&meta);
        } catch (const std::exception&) {
            late = false;
            forget_python_error();
        }
        if (late && out_argument)
            for (size_t i : written)
                if (schema.arguments()[i].is_out() && (*stack)[from + i].isTensor()) {
                    auto t = (*stack)[from + i].toTensor(), m = handed[i].toTensor();
                    if (t.sizes() != m.sizes()) t.resize_(m.sizes());
                }
        if (late && functional)
            for (size_t i = 0; i < meta.size(); ++i) {
                auto* a = schema.returns()[i].alias_info();
                results.push_back(a && a->isWrite() ? IValue() : each_tensor(meta[i], like_on_cuda));
            }
    }
    if (!late) {  // no shape without the values, or a result on the host: as on a device, wait
        sync_stream();
        Stack args = convert(*stack, from, on_cpu, true);
        Stack before = args;
        {
            at::AutoDispatchBelowADInplaceOrView guard;
            op.callBoxed(&args);
        }
        for (size_t i = 0; i < schema.returns().size(); ++i) {
            auto* a = schema.returns()[i].alias_info();
            if (a && a->isWrite()) {
                results.push_back(IValue());
                continue;
            }
            results.push_back(each_tensor(args[i], [](const at::Tensor& t) {
                if (!t.defined()) return t;
                at::Tensor c = like_on_cuda(t);
                if (t.numel()) {
                    on_cpu(c).copy_(t);
                }
                return c;
            }));
        }
        if (out_argument)
            for (size_t i : written)
                if ((*stack)[from + i].isTensor()) {
                    auto t = (*stack)[from + i].toTensor();
                    auto b = before[i].toTensor();
                    if (t.sizes() != b.sizes()) {
                        t.resize_(b.sizes());
                        on_cpu(t).copy_(b);
                    }
                }
    } else {
        auto* l = new Launch{op, convert(*stack, from, on_cpu, true), {}, (int)c10::cuda::current_device()};
        if (functional)
            for (auto& r : results) l->outs.push_back(each_tensor(r, on_cpu));
        enqueue(l);
    }
    Stack answer;
    size_t w = 0;
    for (size_t i = 0; i < schema.returns().size(); ++i) {
        auto* a = schema.returns()[i].alias_info();
        if (a && a->isWrite())
            answer.push_back((*stack)[from + written[w++]]);
        else
            answer.push_back(results[i]);
    }
    torch::jit::drop(*stack, n);
    for (auto& r : answer) stack->push_back(r);
}
static at::Tensor& copy_kernel(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
    if (self.numel() == 0 || self.is_same(src)) return self;
    c10::cuda::CUDAGuard on_device(self.is_cuda() ? self.device() : src.device());
    if (self.is_cuda() && src.is_cuda() && self.device() != src.device()) {
        c10::cuda::CUDAGuard other(src.device());
        sync_stream();
    }
    auto s = c10::cuda::getCurrentCUDAStream().stream();
    at::Tensor from = src.expand(self.sizes());
    bool pinned = !(self.is_cuda() && src.is_cuda()) && (self.is_cuda() ? src : self).is_pinned();
    bool wait = !(self.is_cuda() && src.is_cuda()) && !(non_blocking && pinned);
    auto flat = [](const at::Tensor& t) { return t.is_non_overlapping_and_dense(); };
    if (flat(self) && flat(from) && self.dtype() == from.dtype() && self.strides() == from.strides()) {
        TORCH_CHECK(
            cudaMemcpyAsync(self.data_ptr(), from.data_ptr(), self.nbytes(), cudaMemcpyDefault, s) ==
            cudaSuccess);
    } else {
        struct Copy {
            at::Tensor to, from;
        };
        auto raw = [](const at::Tensor& t) {
            return at::from_blob(
                t.data_ptr(), t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(at::kCPU));
        };
        TORCH_CHECK(
            cudaLaunchHostFunc(
                s,
                [](void* p) {
                    std::unique_ptr<Copy> c((Copy*)p);
                    at::AutoDispatchBelowADInplaceOrView guard;
                    be_late();
                    c->to.copy_(c->from);
                },
                new Copy{raw(self), raw(from)}) == cudaSuccess);
    }
    if (wait || (self.is_cuda() && src.is_cuda() && self.device() != src.device()))
        cudaStreamSynchronize(s);
    else if (pinned) {  // pinned memory is lent again only after this copy, as by torch's own
        const at::Tensor& host = self.is_cuda() ? src : self;
        at::getHostAllocator(at::kCUDA)->record_event(
            host.data_ptr(), host.storage().data_ptr().get_context(),
            c10::cuda::getCurrentCUDAStream().unwrap());
    }
    return self;
}
static bool keep(
    const c10::FunctionSchema& s) {  // allocation, views and what launches nothing keep torch's own kernels
    static const std::set<std::string> names{
        "aten::empty",
        "aten::empty_strided",
        "aten::resize_",
        "aten::set_",
        "aten::record_stream",
        "aten::_local_scalar_dense",
        "aten::is_pinned",
        "aten::_pin_memory",
        "aten::is_set_to",
        "aten::_reshape_alias",
        "aten::copy_",
        "aten::_cudnn_init_dropout_state",
        "aten::_has_compatible_shallow_copy_type"};
    if (names.count(s.name())) return true;
    for (auto& r : s.returns())
        if (r.alias_info() && !r.alias_info()->isWrite()) return true;
    return false;
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    at::globalContext().setUserEnabledCuDNN(false);
    auto& d = c10::Dispatcher::singleton();
    long n = 0;
    for (auto& name : d.getAllOpNames()) {
        if (name.name.rfind("aten::", 0) != 0) continue;
        auto op = d.findSchema(name);
        if (!op || keep(op->schema())) continue;
        static const std::set<std::string> composite{"aten::convolution", "aten::convolution_backward"};
        if (!op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) && !composite.count(name.name)) continue;
        m.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
        ++n;
    }
    m.impl("copy_", copy_kernel);
    if (tracing()) fprintf(stderr, "fake device: %ld operators\n", n);
}
// A kernel that is busy for a time and writes when it began and ended, in nanoseconds that all processes
// share.
static void busy(const at::Tensor& marks, int64_t ns) {
    struct Busy {
        int64_t* marks;
        int64_t ns;
    };
    TORCH_CHECK(
        cudaLaunchHostFunc(
            c10::cuda::getCurrentCUDAStream().stream(),
            [](void* p) {
                std::unique_ptr<Busy> b((Busy*)p);
                auto now = [] {
                    return (int64_t)std::chrono::duration_cast<std::chrono::nanoseconds>(
                               std::chrono::steady_clock::now().time_since_epoch())
                        .count();
                };
                int64_t begin = now();
                std::this_thread::sleep_for(std::chrono::nanoseconds(b->ns));
                b->marks[0] = begin;
                b->marks[1] = now();
            },
            new Busy{marks.data_ptr<int64_t>(), ns}) == cudaSuccess);
}
TORCH_LIBRARY(fake, m) { m.def("busy(Tensor(a!) marks, int ns) -> ()"); }
TORCH_LIBRARY_IMPL(fake, CUDA, m) { m.impl("busy", busy); }
