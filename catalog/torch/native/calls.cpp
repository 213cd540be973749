// Calls of kernels on PyTorch's tensors without Python: those that repeat an earlier call of a plan with other addresses,
// and the node of autograd that starts the gradient's. Python decides what is repeated, and does all else.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <vector>

namespace {

using at::Tensor;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePointer = decltype(torch::autograd::Edge::function);  // a shared_ptr up to PyTorch 2.11

// Cleared while something records calls, which only Python knows.
std::atomic<bool> enabled{true};

// A tensor's form: all but its address.
struct Form {
    std::vector<std::int64_t> sizes, strides;
    at::ScalarType dtype;
    c10::Device device;
    std::size_t place;          // of its address among the words of the argument struct
    std::uintptr_t below = 0;   // bits of the address that are 0
    at::TensorOptions options;

    Form(const Tensor& like, std::size_t place, std::uintptr_t below)
        : sizes(like.sizes().vec()), strides(like.strides().vec()), dtype(like.scalar_type()), device(like.device()),
          place(place), below(below), options(like.options().requires_grad(false)) {}

    // Whether kernels take this tensor as they took the earlier one.
    bool fits(const Tensor& tensor, bool differentiated) const {
        if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.scalar_type() != dtype ||
            tensor.device() != device || tensor.sizes() != sizes || tensor.strides() != strides || tensor.is_neg())
            return false;
        const auto address = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
        return address && !(address & below) && (differentiated || !tensor.requires_grad());
    }
};

std::uint64_t address_of(const Tensor& tensor) { return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()); }

// Kernels with the arguments of a call that they took.
struct Repeated {
    using Entry = std::int32_t (*)(const void* arguments, void* stream);

    std::vector<std::uint64_t> words;
    std::vector<Form> inputs, outputs;
    struct Part {
        std::size_t place;
        std::uint64_t offset;
    };
    std::vector<Part> parts;  // of memory that the kernels share
    std::int64_t room = 0;    // its bytes
    std::vector<Entry> entries;

    // The results; nothing where a tensor is not like the earlier one, or a kernel refuses the call.
    template <class Given>
    std::optional<variable_list> operator()(const Given& given, bool differentiated) const {
        if (!enabled.load(std::memory_order_relaxed)) return std::nullopt;
        auto filled = words;
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            const Tensor& tensor = given(i);
            if (!inputs[i].fits(tensor, differentiated)) return std::nullopt;
            filled[inputs[i].place] = address_of(tensor);
        }
        const c10::Device device = inputs.front().device;
        void* stream = nullptr;
        if (!device.is_cpu()) {
            const c10::impl::VirtualGuardImpl there(device.type());
            if (there.getDevice() != device) return std::nullopt;
            stream = there.getStreamNativeHandle(there.getStream(device));
        }
        const at::AutoDispatchBelowADInplaceOrView plain;
        variable_list made;
        made.reserve(outputs.size());
        for (const Form& form : outputs) {
            made.push_back(at::empty_strided(form.sizes, form.strides, form.options));
            filled[form.place] = address_of(made.back());
        }
        Tensor shared;
        if (!parts.empty()) {
            shared = at::empty({room}, at::TensorOptions().dtype(at::kByte).device(device));
            for (const Part& part : parts) filled[part.place] = address_of(shared) + part.offset;
        }
        for (const Entry entry : entries)
            if (entry(filled.data(), stream) != 0) return std::nullopt;
        return made;
    }
};

struct PyRepeated {
    PyObject_HEAD
    Repeated* call;
    PyObject* kept;  // what the arguments point to
};

// What computes the gradients of one problem's calls: `slow` in Python, and the repeated call once there is one.
struct PyGradient {
    PyObject_HEAD
    PyObject* slow;
    std::atomic<PyObject*> fast;  // a PyRepeated, set once
};

struct Python {
    const PyGILState_STATE state = PyGILState_Ensure();
    ~Python() { PyGILState_Release(state); }
};

// Whether something sees each operator of this thread, and so must see the gradient's.
bool watched() {
    const auto included = c10::impl::tls_local_dispatch_key_set().included_;
    return included.has_any(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                                 c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                                 c10::DispatchKey::FuncTorchDynamicLayerBackMode})) ||
           at::impl::torch_function_mode_enabled() || at::hasCallbacks();
}

// The gradient of a call with two results, of which kernels differentiate the first.
struct CatalogBackward : Node {
    PyGradient* gradient;
    std::vector<SavedVariable> inputs, outputs;

    explicit CatalogBackward(PyGradient* gradient) : gradient(gradient) { Py_INCREF(gradient); }

    ~CatalogBackward() override {
        if (!Py_IsInitialized()) return;
        const Python python;
        Py_DECREF(gradient);
    }

    std::string name() const override { return "CatalogBackward"; }

    void release_variables() override {
        const std::lock_guard<std::mutex> alone(mutex_);
        for (auto* saved : {&inputs, &outputs})
            for (SavedVariable& variable : *saved) variable.reset_data();
    }

    variable_list apply(variable_list&& gradients) override {
        if (!gradients[0].defined() && !gradients[1].defined()) return variable_list(inputs.size());
        const variable_list saved = unpacked();
        auto made = fast(gradients, saved);
        if (!made) made = slow(gradients, saved);
        for (std::size_t i = 0; i < inputs.size(); ++i)
            if (!task_should_compute_output(i)) (*made)[i].reset();
        return std::move(*made);
    }

   private:
    variable_list unpacked() {
        const std::lock_guard<std::mutex> alone(mutex_);
        variable_list saved;
        saved.reserve(inputs.size() + outputs.size());
        for (const SavedVariable& variable : inputs) saved.push_back(variable.unpack());
        for (const SavedVariable& variable : outputs) saved.push_back(variable.unpack(getptr()));
        return saved;
    }

    std::optional<variable_list> fast(const variable_list& gradients, const variable_list& saved) const {
        auto* repeated = reinterpret_cast<PyRepeated*>(gradient->fast.load(std::memory_order_acquire));
        if (!repeated || !gradients[0].defined() || gradients[1].defined() || c10::GradMode::is_enabled() || watched() ||
            gradients[0].key_set() != saved[inputs.size()].key_set())
            return std::nullopt;
        return (*repeated->call)(
            [&](std::size_t i) -> const Tensor& { return i < saved.size() ? saved[i] : gradients[0]; }, true);
    }

    variable_list slow(const variable_list& gradients, const variable_list& saved) const {
        const Python python;
        PyObject* arguments = PyTuple_New(static_cast<Py_ssize_t>(gradients.size() + saved.size()));
        if (!arguments) throw_python();
        Py_ssize_t place = 0;
        for (const variable_list* list : {&gradients, &saved})
            for (const Tensor& tensor : *list) PyTuple_SET_ITEM(arguments, place++, THPVariable_Wrap(tensor));
        PyObject* made = PyObject_Call(gradient->slow, arguments, nullptr);
        Py_DECREF(arguments);
        if (!made) throw_python();
        variable_list results;
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(made); ++i) {
            PyObject* result = PyTuple_GET_ITEM(made, i);
            results.push_back(result == Py_None ? Tensor() : THPVariable_Unpack(result));
        }
        Py_DECREF(made);
        return results;
    }

    [[noreturn]] static void throw_python() {
        python_error error;
        error.persist();
        throw error;
    }
};

template <class Pointer>
Pointer owned(CatalogBackward* node) {
    if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>)
        return Pointer(node, [](auto* unused) { deleteNode(unused); });  // not recursive, for deep graphs
    else
        return Pointer::unsafe_steal_from_new(node);
}

bool is_plain(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == THPVariableClass; }

PyObject* wrapped(const variable_list& tensors) {
    PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(tensors.size()));
    for (std::size_t i = 0; tuple && i < tensors.size(); ++i)
        PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), THPVariable_Wrap(tensors[i]));
    return tuple;
}

// (words, inputs, outputs, parts, room, entries, kept): inputs are (tensor, place, bits that are 0), outputs (tensor,
// place), parts (place, offset).
int init_repeated(PyObject* self, PyObject* args, PyObject*) {
    auto* const repeated = reinterpret_cast<PyRepeated*>(self);
    const char* words;
    Py_ssize_t bytes;
    PyObject *inputs, *outputs, *parts, *entries, *kept;
    long long room;
    if (!PyArg_ParseTuple(args, "y#O!O!O!LO!O", &words, &bytes, &PyTuple_Type, &inputs, &PyTuple_Type, &outputs,
                          &PyTuple_Type, &parts, &room, &PyTuple_Type, &entries, &kept))
        return -1;
    auto call = std::make_unique<Repeated>();
    call->words.resize(bytes / sizeof(std::uint64_t));
    std::memcpy(call->words.data(), words, call->words.size() * sizeof(std::uint64_t));
    call->room = room;
    PyObject* tensor;
    unsigned long long place, number;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inputs); ++i) {
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(inputs, i), "OKK", &tensor, &place, &number)) return -1;
        call->inputs.emplace_back(THPVariable_Unpack(tensor), place, number);
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outputs); ++i) {
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(outputs, i), "OK", &tensor, &place)) return -1;
        call->outputs.emplace_back(THPVariable_Unpack(tensor), place, 0);
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(parts); ++i) {
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(parts, i), "KK", &place, &number)) return -1;
        call->parts.push_back({place, number});
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(entries); ++i) {
        void* const entry = PyLong_AsVoidPtr(PyTuple_GET_ITEM(entries, i));
        if (!entry) return -1;
        call->entries.push_back(reinterpret_cast<Repeated::Entry>(entry));
    }
    repeated->call = call.release();
    Py_INCREF(kept);
    repeated->kept = kept;
    return 0;
}

void free_repeated(PyObject* self) {
    auto* const repeated = reinterpret_cast<PyRepeated*>(self);
    delete repeated->call;
    Py_XDECREF(repeated->kept);
    Py_TYPE(self)->tp_free(self);
}

// (tensors, whether they may require gradients) -> the results, or None.
PyObject* call_repeated(PyObject* self, PyObject* args, PyObject*) {
    HANDLE_TH_ERRORS
    PyObject* tensors;
    int differentiated;
    if (!PyArg_ParseTuple(args, "O!p", &PyTuple_Type, &tensors, &differentiated)) return nullptr;
    const Repeated& call = *reinterpret_cast<PyRepeated*>(self)->call;
    if (static_cast<std::size_t>(PyTuple_GET_SIZE(tensors)) != call.inputs.size()) Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i)
        if (!is_plain(PyTuple_GET_ITEM(tensors, i))) Py_RETURN_NONE;
    std::optional<variable_list> made;
    {
        const auto given = [&](std::size_t i) -> const Tensor& {
            return THPVariable_Unpack(PyTuple_GET_ITEM(tensors, static_cast<Py_ssize_t>(i)));
        };
        // A kernel for CPUs takes its time; the caller's references keep the tensors.
        const pybind11::gil_scoped_release others;
        made = call(given, differentiated != 0);
    }
    if (!made) Py_RETURN_NONE;
    return wrapped(*made);
    END_HANDLE_TH_ERRORS
}

int init_gradient(PyObject* self, PyObject* args, PyObject*) {
    auto* const gradient = reinterpret_cast<PyGradient*>(self);
    PyObject* slow;
    if (!PyArg_ParseTuple(args, "O", &slow)) return -1;
    Py_INCREF(slow);
    gradient->slow = slow;
    new (&gradient->fast) std::atomic<PyObject*>(nullptr);
    return 0;
}

void free_gradient(PyObject* self) {
    auto* const gradient = reinterpret_cast<PyGradient*>(self);
    Py_XDECREF(gradient->slow);
    Py_XDECREF(gradient->fast.load());
    Py_TYPE(self)->tp_free(self);
}

// Makes later gradients this repeated call, if they have none yet.
PyObject* repeat_gradient(PyObject* self, PyObject* call);

// (inputs, results): the results become differentiable.
PyObject* attach(PyObject* self, PyObject* args) {
    HANDLE_TH_ERRORS
    PyObject *inputs, *results;
    if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &inputs, &PyTuple_Type, &results)) return nullptr;
    auto node = owned<NodePointer>(new CatalogBackward(reinterpret_cast<PyGradient*>(self)));
    auto& backward = static_cast<CatalogBackward&>(*node);
    torch::autograd::edge_list edges;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inputs); ++i) {
        const Tensor& tensor = THPVariable_Unpack(PyTuple_GET_ITEM(inputs, i));
        edges.push_back(torch::autograd::impl::gradient_edge(tensor));
        backward.inputs.emplace_back(tensor, false);
    }
    node->set_next_edges(std::move(edges));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(results); ++i) {
        const Tensor& tensor = THPVariable_Unpack(PyTuple_GET_ITEM(results, i));
        torch::autograd::set_history(tensor, node);
        backward.outputs.emplace_back(tensor, true);
    }
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

PyObject* set_enabled(PyObject*, PyObject* flag) {
    enabled.store(PyObject_IsTrue(flag) != 0);
    Py_RETURN_NONE;
}

PyMethodDef gradient_methods[] = {{"attach", attach, METH_VARARGS, nullptr},
                                  {"repeat", repeat_gradient, METH_O, nullptr},
                                  {nullptr, nullptr, 0, nullptr}};

template <class Object>
PyTypeObject type_of(const char* name, initproc init, destructor free, ternaryfunc call, PyMethodDef* methods) {
    PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
    type.tp_name = name;
    type.tp_basicsize = sizeof(Object);
    type.tp_flags = Py_TPFLAGS_DEFAULT;
    type.tp_new = PyType_GenericNew;
    type.tp_init = init;
    type.tp_dealloc = free;
    type.tp_call = call;
    type.tp_methods = methods;
    return type;
}

PyTypeObject repeated_type =
    type_of<PyRepeated>("catalog_calls.Repeated", init_repeated, free_repeated, call_repeated, nullptr);
PyTypeObject gradient_type =
    type_of<PyGradient>("catalog_calls.Gradient", init_gradient, free_gradient, nullptr, gradient_methods);

PyObject* repeat_gradient(PyObject* self, PyObject* call) {
    if (!PyObject_TypeCheck(call, &repeated_type)) {
        PyErr_SetString(PyExc_TypeError, "a Repeated is expected");
        return nullptr;
    }
    PyObject* none = nullptr;
    Py_INCREF(call);
    if (!reinterpret_cast<PyGradient*>(self)->fast.compare_exchange_strong(none, call)) Py_DECREF(call);
    Py_RETURN_NONE;
}

PyMethodDef functions[] = {{"set_enabled", set_enabled, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "catalog_calls", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_catalog_calls() {
    if (PyType_Ready(&repeated_type) < 0 || PyType_Ready(&gradient_type) < 0) return nullptr;
    PyObject* made = PyModule_Create(&module);
    if (!made || PyModule_AddObjectRef(made, "Repeated", reinterpret_cast<PyObject*>(&repeated_type)) < 0 ||
        PyModule_AddObjectRef(made, "Gradient", reinterpret_cast<PyObject*>(&gradient_type)) < 0)
        return nullptr;
    return made;
}
