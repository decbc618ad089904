// An operator on CUDA tensors is enqueued on the current stream. There the CPU's kernel computes
// it, on CPU tensors over the same memory. As in a real kernel, arguments are raw memory: a tensor
// that is freed or overwritten too early gives wrong numbers. An operator that cannot be computed
// correctly raises.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <chrono>
#include <cmath>
#include <iostream>
#include <set>
#include <unordered_map>

#include "fake.h"

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

extern "C" {
int PyGILState_Ensure();
void PyGILState_Release(int);
void PyErr_Clear();
}
static void forget_python_error() {  // which a shape function in Python has left behind
    const int state = PyGILState_Ensure();
    PyErr_Clear();
    PyGILState_Release(state);
}
static bool tracing() {
    static const bool on = getenv("FAKE_TRACE");
    return on;
}
static cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

// ---- arguments
template <class F>
static IValue each_tensor(const IValue& value, F&& f) {
    if (value.isTensor()) return f(value.toTensor());
    if (value.isTensorList()) {
        c10::List<at::Tensor> out;
        for (const at::Tensor& tensor : value.toTensorVector()) out.push_back(f(tensor));
        return out;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> out;
        for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
            out.push_back(tensor ? std::optional<at::Tensor>(f(*tensor)) : tensor);
        return out;
    }
    return value;
}
static bool wrapped(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->is_wrapped_number(); }
static at::TensorOptions on(c10::DeviceType device, const at::Tensor& like) {
    return at::TensorOptions().dtype(like.dtype()).device(device);
}
static at::Tensor over_same_memory(const at::Tensor& t) {
    TORCH_CHECK(!t.is_conj() && !t.is_neg(), "the fake device does not cover conjugate and negative views");
    return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), on(at::kCPU, t));
}
static at::Tensor on_cpu(const at::Tensor& t) {
    if (!t.defined()) return t;
    if (!t.is_cuda()) return wrapped(t) ? t : t.clone();
    at::Tensor out = t.numel() ? over_same_memory(t) : at::empty_strided(t.sizes(), t.strides(), on(at::kCPU, t));
    if (wrapped(t)) out.unsafeGetTensorImpl()->set_wrapped_number(true);
    return out;
}
static at::Tensor on_meta(const at::Tensor& t) {
    return t.defined() && t.is_cuda() ? at::empty_strided(t.sizes(), t.strides(), on(at::kMeta, t)) : t;
}
static at::Tensor like_on_cuda(const at::Tensor& t) {
    return t.defined() ? at::empty_strided(t.sizes(), t.strides(), on(at::kCUDA, t)) : t;
}
static Stack convert(const IValue* arguments, size_t count, at::Tensor (*f)(const at::Tensor&), c10::DeviceType device) {
    Stack out;
    out.reserve(count);
    for (size_t i = 0; i < count; ++i) {
        const IValue& value = arguments[i];
        if (value.isDevice()) out.emplace_back(c10::Device(device));
        else if (value.isGenerator()) out.emplace_back();
        else out.push_back(each_tensor(value, f));
    }
    return out;
}

// ---- properties of an operator, read from its schema once
struct Known {
    size_t count = 0;               // number of arguments
    std::vector<size_t> written;    // arguments that the operator writes
    std::vector<size_t> resizable;  // out= arguments
    std::vector<bool> aliased;      // for each result whether it is an argument
    bool functional = false;        // at least one result is not an argument
    bool plain = true;              // all results are tensors
    bool computed = false;          // the CPU has a kernel for it
    bool mixes = false;             // takes CPU tensors beside CUDA tensors
    bool random = false;            // draws random numbers
    int generator = -1;             // index of the argument that is a generator; -1 if none is
};
static Known know(const OperatorHandle& op) {
    const auto& schema = op.schema();
    Known known;
    known.count = schema.arguments().size();
    for (size_t i = 0; i < known.count; ++i) {
        const auto& argument = schema.arguments()[i];
        if (argument.alias_info() && argument.alias_info()->isWrite()) known.written.push_back(i);
        if (argument.is_out()) known.resizable.push_back(i);
        if (argument.type()->str().rfind("Generator", 0) == 0) known.generator = (int)i;
    }
    for (const auto& result : schema.returns()) {
        const bool aliased = result.alias_info() && result.alias_info()->isWrite();
        known.aliased.push_back(aliased);
        known.functional |= !aliased;
        known.plain &= aliased || result.type()->isSubtypeOf(*c10::TensorType::get()) ||
                       result.type()->isSubtypeOf(*c10::ListType::ofTensors());
    }
    known.computed = op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
    for (const char* name : {"aten::index", "aten::_index_put", "aten::_unsafe_index", "aten::_ctc_loss"})
        known.mixes |= schema.name().rfind(name, 0) == 0;
    known.random = op.hasTag(at::Tag::nondeterministic_seeded);
    return known;
}
static const Known& known_of(const OperatorHandle& op) {
    static thread_local std::unordered_map<const void*, Known> all;
    const void* key = &op.schema();
    const auto found = all.find(key);
    return found != all.end() ? found->second : all.emplace(key, know(op)).first->second;
}
static c10::Device device_of(const OperatorHandle& op, const IValue* arguments, const Known& known) {
    std::optional<c10::Device> found;
    bool host = false;
    for (size_t i = 0; i < known.count; ++i) {
        each_tensor(arguments[i], [&](const at::Tensor& t) {
            if (!t.defined()) return t;
            TORCH_CHECK(
                !t.is_cuda() || !found || *found == t.device(), "expected all tensors on one device, got ", *found,
                " and ", t.device(), " for ", op.operator_name());
            if (t.is_cuda()) found = t.device();
            host |= !t.is_cuda() && t.dim() > 0;
            return t;
        });
    }
    for (size_t i = 0; i < known.count && !found; ++i)
        if (arguments[i].isDevice() && arguments[i].toDevice().is_cuda() && arguments[i].toDevice().has_index())
            found = arguments[i].toDevice();
    TORCH_CHECK(
        !host || !found || known.mixes, "expected all tensors on ", *found, ", got one on the CPU for ",
        op.operator_name());
    return found.value_or(c10::Device(at::kCUDA, c10::cuda::current_device()));
}

// ---- shapes of results, computed on the "meta" device and cached for each operator and shapes of
// its arguments, since a shape function in Python takes 1 ms
struct Shapes {
    bool known = false;
    Stack results;
    Stack arguments;  // afterwards: an out= argument may have been resized
};
// Appends all properties of a value that a shape may depend on. Returns false if it cannot.
static bool describe(const IValue& value, std::string& key) {
    auto add = [&](const auto& plain) { key.append((const char*)&plain, sizeof plain); };
    auto add_all = [&](const auto& list) {
        add(list.size());
        for (const auto& each : list) add(each);
    };
    auto add_tensor = [&](const at::Tensor& t) {
        add(t.defined());
        if (!t.defined()) return t;
        add(t.scalar_type());
        add(t.device().type());
        add(wrapped(t));
        add_all(t.sizes());
        add_all(t.strides());
        return t;
    };
    add(value.isNone() ? 'n' : value.isTensor() ? 't' : value.isInt() ? 'i' : value.isDouble() ? 'd' : 'o');
    if (value.isNone() || value.isDevice() || value.isGenerator()) return true;
    if (value.isTensor()) add_tensor(value.toTensor());
    else if (value.isInt()) add(value.toInt());
    else if (value.isDouble()) add(value.toDouble());
    else if (value.isBool()) add(value.toBool());
    else if (value.isIntList()) add_all(value.toIntVector());
    else if (value.isDoubleList()) add_all(value.toDoubleVector());
    else if (value.isString()) key += value.toStringRef() + '\0';
    else if (value.isTensorList() || value.isOptionalTensorList()) {
        key += '[';
        each_tensor(value, add_tensor);
        key += ']';
    } else return false;
    return true;
}
static Shapes infer(const OperatorHandle& op, const IValue* arguments, const Known& known) {
    Shapes shapes;
    shapes.results = convert(arguments, known.count, on_meta, at::kMeta);
    shapes.arguments = shapes.results;
    try {
        at::AutoDispatchBelowADInplaceOrView guard;
        op.callBoxed(&shapes.results);
        shapes.known = true;
    } catch (const std::exception&) {
        forget_python_error();
    }
    return shapes;
}
static Shapes shapes_of(const OperatorHandle& op, const IValue* arguments, const Known& known) {
    static thread_local std::unordered_map<std::string, Shapes> all;
    constexpr size_t MOST = 10'000;
    const void* name = &op.schema();
    std::string key((const char*)&name, sizeof name);
    for (size_t i = 0; i < known.count; ++i)
        if (!describe(arguments[i], key)) return infer(op, arguments, known);
    const auto found = all.find(key);
    if (found != all.end()) return found->second;
    if (all.size() > MOST) all.clear();
    return all.emplace(std::move(key), infer(op, arguments, known)).first->second;
}

// ---- random numbers: drawn in the stream, with the device's generator as it was at the launch
static at::Generator generator_at_launch(const IValue& given) {
    cudaStreamCaptureStatus status;
    C10_CUDA_CHECK(cudaStreamIsCapturing(stream(), &status));
    TORCH_CHECK(status == cudaStreamCaptureStatusNone, "the fake device does not cover random numbers in a graph");
    at::Generator of_device = given.isNone()
                                  ? at::cuda::detail::getDefaultCUDAGenerator(c10::cuda::current_device())
                                  : given.toGenerator();
    std::lock_guard<std::mutex> lock(of_device.mutex());
    auto* state = at::check_generator<at::CUDAGeneratorImpl>(of_device);
    const uint64_t offset = state->philox_offset_per_thread();
    state->set_philox_offset_per_thread(offset + 4);
    return at::make_generator<at::CPUGeneratorImpl>(state->current_seed() * 0x9E3779B97F4A7C15ull + offset);
}

// ---- launching
struct Launch {
    OperatorHandle op;
    Stack arguments;
    Stack results;  // CPU tensors over the memory of the results that are not arguments
    int device;
    long late_us;
};
static void copy_into(const IValue& to, const IValue& from) {
    if (to.isTensor() && to.toTensor().defined()) {
        if (from.toTensor().numel() || !to.toTensor().numel()) to.toTensor().copy_(from.toTensor());
        // The CPU omits some results, such as statistics in evaluation. They must not be read.
        else to.toTensor().fill_(NAN);
    }
    if (!to.isTensorList()) return;
    const auto into = to.toTensorVector(), values = from.toTensorVector();
    for (size_t i = 0; i < into.size(); ++i) into[i].copy_(values[i]);
}
static void run(void* data) {
    const auto& launch = *(Launch*)data;
    static thread_local const bool once = (at::set_num_threads(1), true);
    (void)once;
    const fake::Alone alone("gpu", launch.device);
    fake_sleep_us(launch.late_us);
    try {
        at::AutoDispatchBelowADInplaceOrView guard;
        Stack stack = launch.arguments;
        launch.op.callBoxed(&stack);
        for (size_t i = 0; i < launch.results.size(); ++i) copy_into(launch.results[i], stack[i]);
    } catch (const std::exception& error) {  // like a device's assertion: later results are invalid
        std::cerr << "fake CUDA device: " << launch.op.operator_name() << " failed in its stream: " << error.what() << "\n";
        abort();
    }
}
template <class T>
static void enqueue(void (*run)(void*), T* data) {
    C10_CUDA_CHECK(fake_launch(stream(), run, [](void* data) { delete (T*)data; }, data));
}
static Stack launch(const OperatorHandle& op, const IValue* arguments, const Known& known, const Shapes& shapes) {
    for (size_t i : known.resizable) {
        if (!arguments[i].isTensor()) continue;
        const at::Tensor out = arguments[i].toTensor(), wanted = shapes.arguments[i].toTensor();
        if (out.sizes() != wanted.sizes()) out.resize_(wanted.sizes());
    }
    Stack results;
    for (size_t i = 0; known.functional && i < shapes.results.size(); ++i)
        results.push_back(known.aliased[i] ? IValue() : each_tensor(shapes.results[i], like_on_cuda));
    auto data = std::make_unique<Launch>(Launch{op, convert(arguments, known.count, on_cpu, at::kCPU), {}, 0, 0});
    if (known.generator >= 0) data->arguments[known.generator] = generator_at_launch(arguments[known.generator]);
    for (const IValue& each : results) data->results.push_back(each_tensor(each, on_cpu));
    data->device = fake_physical(c10::cuda::current_device());
    data->late_us = fake_lateness_us("KERNEL", stream());
    enqueue(run, data.release());
    return results;
}
// In stream order: kernels of the memory's previous user, another thread, may still be waiting on
// this stream.
static void fill_in_order(const at::Tensor& out, const at::Tensor& computed) {
    struct Fill {
        at::Tensor to, from;
    };
    if (!out.defined() || !out.numel()) return;
    enqueue(
        [](void* data) {
            const auto& fill = *(Fill*)data;
            at::AutoDispatchBelowADInplaceOrView guard;
            at::Tensor(fill.to).copy_(fill.from);
        },
        new Fill{over_same_memory(out), computed});
}
// The shape depends on values, or a result is on the host. As on a real device the host waits.
static Stack compute_now(const OperatorHandle& op, const IValue* arguments, const Known& known) {
    C10_CUDA_CHECK(cudaStreamSynchronize(stream()));
    Stack stack = convert(arguments, known.count, on_cpu, at::kCPU), before, results;
    if (known.generator >= 0) stack[known.generator] = generator_at_launch(arguments[known.generator]);
    before = stack;
    {
        at::AutoDispatchBelowADInplaceOrView guard;
        op.callBoxed(&stack);
    }
    for (size_t i = 0; i < known.aliased.size(); ++i) {
        results.push_back(known.aliased[i] ? IValue() : each_tensor(stack[i], [](const at::Tensor& computed) {
            at::Tensor out = like_on_cuda(computed);
            fill_in_order(out, computed);
            return out;
        }));
    }
    for (size_t i : known.resizable) {
        if (!arguments[i].isTensor()) continue;
        const at::Tensor out = arguments[i].toTensor(), computed = before[i].toTensor();
        if (out.sizes() == computed.sizes()) continue;
        out.resize_(computed.sizes());
        fill_in_order(out, computed);
    }
    return results;
}
// As on CUDA, a tensor divided by a number of the host is multiplied by the number's reciprocal.
static OperatorHandle by_reciprocal(const OperatorHandle& op, Stack& stack) {
    const auto& schema = op.schema();
    if (schema.name() != "aten::div" && schema.name() != "aten::div_") return op;
    if (schema.overload_name() != "Tensor" && schema.overload_name() != "out") return op;  // rounds
    const size_t from = stack.size() - schema.arguments().size();
    const at::Tensor self = stack[from].toTensor(), by = stack[from + 1].toTensor();
    if (by.is_cuda() || !self.is_floating_point()) return op;
    const double number = by.item<double>();
    const double inverse = self.scalar_type() == at::kDouble ? 1.0 / number : (double)(1.0f / (float)number);
    at::Tensor factor = at::scalar_tensor(inverse, at::kDouble);
    factor.unsafeGetTensorImpl()->set_wrapped_number(true);
    stack[from + 1] = factor;
    const char* product = schema.name() == "aten::div" ? "aten::mul" : "aten::mul_";
    return c10::Dispatcher::singleton().findSchemaOrThrow(product, schema.overload_name().c_str());
}
static void kernel(const OperatorHandle& given, Stack* stack) {
    const OperatorHandle op = by_reciprocal(given, *stack);
    const Known& known = known_of(op);
    const IValue* arguments = stack->data() + (stack->size() - known.count);
    TORCH_CHECK_NOT_IMPLEMENTED(
        known.computed && !(known.random && known.generator < 0), "the fake device does not cover ",
        op.operator_name());
    const c10::cuda::CUDAGuard on_device(device_of(op, arguments, known));
    if (tracing()) std::cerr << "fake CUDA device: " << op.operator_name() << "\n";
    const bool needs_shapes = known.functional || !known.resizable.empty();
    Shapes shapes;
    if (known.plain && needs_shapes) shapes = shapes_of(op, arguments, known);
    const bool late = known.plain && (shapes.known || !needs_shapes);
    Stack results = late ? launch(op, arguments, known, shapes) : compute_now(op, arguments, known);
    Stack answer;
    for (size_t i = 0, written = 0; i < known.aliased.size(); ++i)
        answer.push_back(known.aliased[i] ? arguments[known.written[written++]] : results[i]);
    torch::jit::drop(*stack, known.count);
    for (IValue& each : answer) stack->push_back(std::move(each));
}

// ---- operators with a kernel of their own
static void copy_strided(const at::Tensor& to, const at::Tensor& from) {
    struct Copy {
        at::Tensor to, from;
        long late_us;
    };
    enqueue(
        [](void* data) {
            const auto& copy = *(Copy*)data;
            at::AutoDispatchBelowADInplaceOrView guard;
            fake_sleep_us(copy.late_us);
            at::Tensor(copy.to).copy_(copy.from);
        },
        new Copy{over_same_memory(to), over_same_memory(from), fake_lateness_us("COPY", stream())});
}
static at::Tensor& copy_kernel(at::Tensor& to, const at::Tensor& source, bool non_blocking) {
    if (to.numel() == 0 || to.is_same(source)) return to;
    const bool on_device = to.is_cuda() && source.is_cuda(), across = on_device && to.device() != source.device();
    const c10::cuda::CUDAGuard guard(to.is_cuda() ? to.device() : source.device());
    if (across) {
        const c10::cuda::CUDAGuard other(source.device());
        C10_CUDA_CHECK(cudaStreamSynchronize(stream()));
    }
    const at::Tensor from = source.expand(to.sizes()), &host = to.is_cuda() ? source : to;
    const bool pinned = !on_device && host.is_pinned();
    const bool dense = to.is_non_overlapping_and_dense() && from.is_non_overlapping_and_dense();
    const bool flagged = to.is_conj() != from.is_conj() || to.is_neg() != from.is_neg();
    if (dense && !flagged && to.dtype() == from.dtype() && to.strides() == from.strides())
        C10_CUDA_CHECK(cudaMemcpyAsync(to.data_ptr(), from.data_ptr(), to.nbytes(), cudaMemcpyDefault, stream()));
    else
        copy_strided(to, from);
    if (across || !(on_device || (non_blocking && pinned))) C10_CUDA_CHECK(cudaStreamSynchronize(stream()));
    else if (pinned)  // as torch's own copy: the allocator reuses the memory only after this copy
        at::getHostAllocator(at::kCUDA)->record_event(
            host.data_ptr(), host.storage().data_ptr().get_context(), c10::cuda::getCurrentCUDAStream().unwrap());
    return to;
}
// The CPU's kernel draws from the CPU's generator. This one uses operators that take the device's.
static std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train) {
    if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
    at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
    return {input * mask * (p < 1 ? 1 / (1 - p) : 0.0), mask};
}
// A kernel that is busy for a time. It writes when it began and ended, in nanoseconds of a clock
// that all processes share.
static void busy(const at::Tensor& marks, int64_t ns) {
    struct Busy {
        int64_t* marks;
        int64_t ns;
    };
    enqueue(
        [](void* data) {
            const auto& busy = *(Busy*)data;
            auto now = [] {
                const auto since = std::chrono::steady_clock::now().time_since_epoch();
                return (int64_t)std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
            };
            const int64_t begin = now();
            std::this_thread::sleep_for(std::chrono::nanoseconds(busy.ns));
            busy.marks[0] = begin;
            busy.marks[1] = now();
        },
        new Busy{marks.data_ptr<int64_t>(), ns});
}

// Allocations, views and operators that launch no kernel keep torch's own kernels.
static bool keeps_its_own(const c10::FunctionSchema& schema) {
    static const std::set<std::string> names{
        "aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::record_stream",
        "aten::_local_scalar_dense", "aten::is_pinned", "aten::_pin_memory", "aten::is_set_to",
        "aten::_reshape_alias", "aten::copy_", "aten::_cudnn_init_dropout_state",
        "aten::_has_compatible_shallow_copy_type", "aten::native_dropout"};
    if (names.count(schema.name())) return true;
    for (const auto& result : schema.returns())
        if (result.alias_info() && !result.alias_info()->isWrite()) return true;
    return false;
}
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
    auto& context = at::globalContext();  // prefer implementations that consist of other operators
    context.setUserEnabledCuDNN(false);
    context.setSDPUseFlash(false);
    context.setSDPUseMemEfficient(false);
    context.setSDPUseCuDNN(false);
    static const std::set<std::string> composite{"aten::convolution", "aten::convolution_backward"};
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames()) {
        if (name.name.rfind("aten::", 0) != 0) continue;
        const auto op = dispatcher.findSchema(name);
        if (!op || keeps_its_own(op->schema())) continue;
        if (op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || composite.count(name.name))
            library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
    }
    library.impl("copy_", copy_kernel);
    library.impl("native_dropout", dropout);
}
TORCH_LIBRARY(fake, library) { library.def("busy(Tensor(a!) marks, int ns) -> ()"); }
TORCH_LIBRARY_IMPL(fake, CUDA, library) { library.impl("busy", busy); }
