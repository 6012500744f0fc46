/* Launches of compiled kernels: all that is known beforehand is laid out once, a call fills in pointers and numbers.

   Python's numbers and tensors come in, one call of the CUDA driver goes out.  libcuda is opened by name when the first
   kernel is loaded, so that this compiles without CUDA. */

#include "driver.h"
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 16, PLAIN_SHARED = 48 << 10, INVALID_CONTEXT = 201, COOPERATIVE = 2 };
enum { MAX_THREADS_PER_BLOCK = 0, STATIC_SHARED = 1, MAX_DYNAMIC_SHARED = 8 }; /* of a function */
enum { MULTIPROCESSORS = 16, MAX_SHARED_OF_BLOCK = 97 };                       /* of a device */
enum { PREFER_SHARED = 1 };

static const char LAUNCH[] = "launch", BATCH[] = "batch";

typedef struct { int id; char pad[4]; union { char bytes[64]; int integer; } value; } Attribute;

typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned count;
} Config;

typedef struct {
    void *function;
    unsigned grid[3], block[3], shared;
    void **slots, **extra, *kernel, *context;
} Node;

static struct {
    int (*cuGetErrorString)(int, const char **);
    int (*cuCtxGetCurrent)(void **);
    int (*cuCtxSetCurrent)(void *);
    int (*cuDevicePrimaryCtxRetain)(void **, int);
    int (*cuDeviceGetAttribute)(int *, int, int);
    int (*cuModuleLoadData)(void **, const void *);
    int (*cuModuleGetFunction)(void **, void *, const char *);
    int (*cuFuncGetAttribute)(int *, int, void *);
    int (*cuFuncSetAttribute)(void *, int, int);
    int (*cuFuncSetCacheConfig)(void *, int);
    int (*cuOccupancyMaxActiveBlocksPerMultiprocessor)(int *, void *, int, size_t);
    int (*cuLaunchKernelEx)(const Config *, void *, void **, void **);
    int (*cuStreamIsCapturing)(void *, int *);
    int (*cuGraphCreate)(void **, unsigned);
    int (*cuGraphDestroy)(void *);
    int (*cuGraphAddKernelNode_v2)(void **, void *, void **, size_t, const Node *);
    int (*cuGraphInstantiateWithFlags)(void **, void *, unsigned long long);
    int (*cuGraphExecKernelNodeSetParams_v2)(void *, void *, const Node *);
    int (*cuGraphExecDestroy)(void *);
    int (*cuGraphLaunch)(void *, void *);
} cuda;

struct Launch {
    void *function;
    Config config;
    Attribute cooperative;
    int device;
    Py_ssize_t pointers, numbers, slots;
    char *alignments;  /* of the pointers: a letter each, w whole words of 16 bytes, e any */
    char *types;       /* of the numbers that a call hands over: i int32, q int64, d float64 */
    uint64_t *fixed;   /* the slots behind them */
    PyObject *otherwise, *failed;
};

static PyObject *data_ptr;

const char *message_of(int status) {
    const char *text = NULL;
    cuda.cuGetErrorString(status, &text);
    return text ? text : "unknown error";
}

static PyObject *raise(int status) {
    return PyErr_Format(PyExc_RuntimeError, "%s (CUDA driver error %d)", message_of(status), status);
}

int enter_device(int device) {
    void *context = NULL;
    int status = cuda.cuCtxGetCurrent(&context);
    if (status || context) return status;
    status = cuda.cuDevicePrimaryCtxRetain(&context, device);
    return status ? status : cuda.cuCtxSetCurrent(context);
}

static PyObject *connect(PyObject *module, PyObject *library) {
    const char *name = PyUnicode_AsUTF8(library);
    void *handle = name ? dlopen(name, RTLD_NOW) : NULL;
    if (!name) return NULL;
    if (!handle) return PyErr_Format(PyExc_OSError, "%s", dlerror());
#define TAKE(function)                                                                                       \
    if (!(*(void **)&cuda.function = dlsym(handle, #function)))                                              \
        return PyErr_Format(PyExc_OSError, "%s has no " #function, name);
    TAKE(cuGetErrorString) TAKE(cuCtxGetCurrent) TAKE(cuCtxSetCurrent) TAKE(cuDevicePrimaryCtxRetain)
    TAKE(cuDeviceGetAttribute) TAKE(cuModuleLoadData) TAKE(cuModuleGetFunction) TAKE(cuFuncGetAttribute)
    TAKE(cuFuncSetAttribute) TAKE(cuFuncSetCacheConfig) TAKE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
    TAKE(cuLaunchKernelEx) TAKE(cuStreamIsCapturing)
    TAKE(cuGraphCreate) TAKE(cuGraphDestroy) TAKE(cuGraphAddKernelNode_v2) TAKE(cuGraphInstantiateWithFlags)
    TAKE(cuGraphExecKernelNodeSetParams_v2) TAKE(cuGraphExecDestroy) TAKE(cuGraphLaunch)
#undef TAKE
    const char *missing = connect_ordered(handle);
    if (missing) return PyErr_Format(PyExc_OSError, "%s has no %s", name, missing);
    Py_RETURN_NONE;
}

/* Everything that can be refused is refused here, before anything runs. */
static int prepare(void *function, int device, int threads, int shared) {
    int status, most = 0, taken = 0, limit = 0;
    if ((status = cuda.cuFuncGetAttribute(&limit, MAX_THREADS_PER_BLOCK, function))) return status;
    if (threads > limit) return 701; /* out of resources */
    if (shared <= PLAIN_SHARED) return 0;
    if ((status = cuda.cuFuncSetCacheConfig(function, PREFER_SHARED))) return status;
    if ((status = cuda.cuDeviceGetAttribute(&most, MAX_SHARED_OF_BLOCK, device))) return status;
    if ((status = cuda.cuFuncGetAttribute(&taken, STATIC_SHARED, function))) return status;
    if (shared > most - taken) return 701;
    return cuda.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, most - taken);
}

static PyObject *load(PyObject *module, PyObject *arguments) {
    const char *name;
    Py_buffer image;
    int device, threads, shared, status;
    void *loaded = NULL, *function = NULL;
    if (!PyArg_ParseTuple(arguments, "y*siii", &image, &name, &device, &threads, &shared)) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    status = enter_device(device);
    if (!status) status = cuda.cuModuleLoadData(&loaded, image.buf);
    if (!status) status = cuda.cuModuleGetFunction(&function, loaded, name);
    if (!status) status = prepare(function, device, threads, shared);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&image);
    return status ? raise(status) : PyLong_FromVoidPtr(function);
}

static PyObject *resident(PyObject *module, PyObject *arguments) {
    unsigned long long function;
    int device, threads, shared, status, each = 0, multiprocessors = 0;
    if (!PyArg_ParseTuple(arguments, "Kiii", &function, &device, &threads, &shared)) return NULL;
    status = enter_device(device);
    if (!status)
        status = cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &each, (void *)(uintptr_t)function, threads, (size_t)shared);
    if (!status) status = cuda.cuDeviceGetAttribute(&multiprocessors, MULTIPROCESSORS, device);
    return status ? raise(status) : PyLong_FromLong((long)each * multiprocessors);
}

static int number(char type, PyObject *value, void *slot) {
    if (type == 'd') {
        *(double *)slot = PyFloat_AsDouble(value);
    } else {
        long long integer = PyLong_AsLongLong(value);
        if (type == 'i' && (integer > INT32_MAX || integer < INT32_MIN)) {
            PyErr_Format(PyExc_OverflowError, "%lld does not fit an int32", integer);
            return 0;
        }
        *(int64_t *)slot = integer; /* little-endian: the first bytes of a slot are its int32 */
    }
    return !PyErr_Occurred();
}

int fill_launch(const Launch *l, PyObject *const *given, uint64_t *values) {
    for (Py_ssize_t k = 0; k < l->pointers; k++) {
        PyObject *of = given[k], *address = PyLong_CheckExact(of) ? Py_NewRef(of) : PyObject_CallMethodNoArgs(of, data_ptr);
        if (!address) return -1;
        values[k] = PyLong_AsUnsignedLongLong(address);
        Py_DECREF(address);
        if (PyErr_Occurred()) return -1;
        if (l->alignments[k] == 'w' && values[k] % ALIGNMENT) return 0;
    }
    for (Py_ssize_t k = 0; k < l->numbers; k++)
        if (!number(l->types[k], given[l->pointers + k], &values[l->pointers + k])) return -1;
    Py_ssize_t first = l->pointers + l->numbers;
    memcpy(values + first, l->fixed, (size_t)(l->slots - first) * sizeof *values);
    return 1;
}

PyObject *wrong_count(Py_ssize_t wanted, Py_ssize_t count) {
    return PyErr_Format(PyExc_TypeError, "a launch takes %zd arguments, not %zd", wanted, count);
}

int start_launch(const Launch *l, void *stream, uint64_t *values) {
    void *addresses[l->slots];
    for (Py_ssize_t k = 0; k < l->slots; k++) addresses[k] = values + k;
    Config config = l->config;
    config.stream = stream;
    int status = cuda.cuLaunchKernelEx(&config, l->function, addresses, NULL);
    if (status == INVALID_CONTEXT && !(status = enter_device(l->device)))
        status = cuda.cuLaunchKernelEx(&config, l->function, addresses, NULL);
    return status;
}

PyObject *raise_refused(const Launch *l, int status) { return PyObject_CallFunction(l->failed, "s", message_of(status)); }

Py_ssize_t arguments_of(const Launch *l) { return l->pointers + l->numbers; }

Py_ssize_t slots_of(const Launch *l) { return l->slots; }

static PyObject *launch(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    const Launch *l = PyCapsule_GetPointer(self, LAUNCH);
    if (!l) return NULL;
    if (count != 1 + arguments_of(l)) return wrong_count(1 + arguments_of(l), count);
    uint64_t values[l->slots];
    int filled = given[0] == Py_None ? 0 : fill_launch(l, given + 1, values);
    if (filled < 0) return NULL;
    if (!filled) return PyObject_Vectorcall(l->otherwise, given + 1, (size_t)(count - 1), NULL);
    void *stream = PyLong_AsVoidPtr(given[0]);
    if (PyErr_Occurred()) return NULL;
    int status;
    Py_BEGIN_ALLOW_THREADS;
    status = start_launch(l, stream, values);
    Py_END_ALLOW_THREADS;
    if (status) return raise_refused(l, status);
    Py_RETURN_NONE;
}

/* Several launches that follow one another: a graph, whose launch costs less than that of one kernel.  Parameters are
   set where they differ from those of the last time; what runs already is not affected.  A graph belongs to one thread
   at a time: a second thread, a stream that is being captured, and whatever takes Triton's own entry launch one by one. */
typedef struct {
    Py_ssize_t count, arguments, slots;
    const Launch **launches;
    PyObject *functions; /* a tuple, which keeps the launches */
    pthread_mutex_t mutex;
    void *graph, *executable, **nodes; /* nodes are the graph's, and tell the executable which kernel is meant */
    uint64_t *last;
    int is_refused;
} Batch;

static Node node_of(const Launch *l, void **slots) {
    const Config *c = &l->config;
    return (Node){l->function, {c->grid[0], 1, 1}, {c->block[0], 1, 1}, c->shared, slots, NULL, NULL, NULL};
}

static int make_graph(Batch *b, void **addresses) {
    int status = cuda.cuGraphCreate(&b->graph, 0);
    for (Py_ssize_t k = 0; k < b->count && !status; addresses += b->launches[k++]->slots) {
        Node node = node_of(b->launches[k], addresses);
        status = cuda.cuGraphAddKernelNode_v2(&b->nodes[k], b->graph, k ? &b->nodes[k - 1] : NULL, k > 0, &node);
    }
    if (!status) status = cuda.cuGraphInstantiateWithFlags(&b->executable, b->graph, 0);
    return status;
}

/* Have the graph hand over ``values``. */
static int set_graph(Batch *b, const uint64_t *values, void **addresses) {
    int status = 0;
    if (!b->executable) {
        status = make_graph(b, addresses);
    } else {
        for (Py_ssize_t k = 0, at = 0; k < b->count && !status; at += b->launches[k++]->slots) {
            if (!memcmp(b->last + at, values + at, (size_t)b->launches[k]->slots * sizeof *values)) continue;
            Node node = node_of(b->launches[k], addresses + at);
            status = cuda.cuGraphExecKernelNodeSetParams_v2(b->executable, b->nodes[k], &node);
        }
    }
    memcpy(b->last, values, (size_t)b->slots * sizeof *values);
    b->is_refused = status != 0; /* what it hands over is not known any more */
    return status;
}

/* 0, or an error of the driver, or -1 where the kernels are to be launched one by one. */
static int launch_graph(Batch *b, void *stream, const uint64_t *values, void **addresses) {
    int capturing = 0, status;
    if (pthread_mutex_trylock(&b->mutex)) return -1;
    status = cuda.cuStreamIsCapturing(stream, &capturing);
    if (status == INVALID_CONTEXT && !(status = enter_device(b->launches[0]->device)))
        status = cuda.cuStreamIsCapturing(stream, &capturing);
    if (status || capturing || b->is_refused || set_graph(b, values, addresses))
        status = -1;
    else
        status = cuda.cuGraphLaunch(b->executable, stream);
    pthread_mutex_unlock(&b->mutex);
    return status;
}

static PyObject *one_by_one(const Batch *b, PyObject *const *given) {
    PyObject *stream = given[0];
    for (Py_ssize_t k = 0; k < b->count; k++) {
        Py_ssize_t count = arguments_of(b->launches[k]);
        PyObject *one[1 + count];
        one[0] = stream;
        memcpy(one + 1, given + 1, (size_t)count * sizeof *one);
        PyObject *done = PyObject_Vectorcall(PyTuple_GET_ITEM(b->functions, k), one, (size_t)count + 1, NULL);
        if (!done) return NULL;
        Py_DECREF(done);
        given += count;
    }
    Py_RETURN_NONE;
}

static PyObject *launch_batch(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    Batch *b = PyCapsule_GetPointer(self, BATCH);
    if (!b) return NULL;
    if (count != 1 + b->arguments) return wrong_count(1 + b->arguments, count);
    uint64_t values[b->slots];
    void *addresses[b->slots];
    if (given[0] == Py_None) return one_by_one(b, given);
    PyObject *const *next = given + 1;
    for (Py_ssize_t k = 0, at = 0; k < b->count; at += b->launches[k++]->slots) {
        int filled = fill_launch(b->launches[k], next, values + at);
        if (filled < 0) return NULL;
        if (!filled) return one_by_one(b, given);
        next += arguments_of(b->launches[k]);
    }
    for (Py_ssize_t k = 0; k < b->slots; k++) addresses[k] = values + k;
    void *stream = PyLong_AsVoidPtr(given[0]);
    if (PyErr_Occurred()) return NULL;
    int status;
    Py_BEGIN_ALLOW_THREADS;
    status = launch_graph(b, stream, values, addresses);
    Py_END_ALLOW_THREADS;
    if (status < 0) return one_by_one(b, given);
    if (status) return raise_refused(b->launches[0], status);
    Py_RETURN_NONE;
}

static void release(PyObject *capsule) {
    Launch *l = PyCapsule_GetPointer(capsule, LAUNCH);
    Py_XDECREF(l->otherwise);
    Py_XDECREF(l->failed);
    free(l->alignments);
    free(l->types);
    free(l->fixed);
    free(l);
}

const Launch *launch_of(PyObject *function) {
    PyObject *self = PyCFunction_Check(function) ? PyCFunction_GetSelf(function) : NULL;
    if (self && PyCapsule_IsValid(self, LAUNCH)) return PyCapsule_GetPointer(self, LAUNCH);
    PyErr_Format(PyExc_TypeError, "%R is no launch", function);
    return NULL;
}

static PyMethodDef launch_method = {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, NULL};

static PyObject *launcher(PyObject *module, PyObject *arguments) {
    PyObject *fixed, *otherwise, *failed;
    const char *alignments, *types, *fixed_types;
    unsigned long long function;
    unsigned grid, threads, shared;
    int device, cooperative;
    if (!PyArg_ParseTuple(arguments, "KiIIIpsssO!OO", &function, &device, &grid, &threads, &shared, &cooperative,
                          &alignments, &types, &fixed_types, &PyTuple_Type, &fixed, &otherwise, &failed))
        return NULL;
    Py_ssize_t pointers = (Py_ssize_t)strlen(alignments), numbers = (Py_ssize_t)strlen(types), behind = PyTuple_GET_SIZE(fixed);
    if (behind != (Py_ssize_t)strlen(fixed_types)) return PyErr_Format(PyExc_ValueError, "a type for each number");
    Launch *l = calloc(1, sizeof *l);
    PyObject *capsule = l ? PyCapsule_New(l, LAUNCH, release) : NULL;
    if (!capsule) {
        free(l);
        return PyErr_NoMemory();
    }
    l->alignments = strdup(alignments);
    l->types = strdup(types);
    l->fixed = calloc((size_t)behind + 2, sizeof *l->fixed); /* a kernel's last two parameters are null pointers */
    if (!l->alignments || !l->types || !l->fixed) {
        Py_DECREF(capsule);
        return PyErr_NoMemory();
    }
    l->otherwise = Py_NewRef(otherwise);
    l->failed = Py_NewRef(failed);
    for (Py_ssize_t k = 0; k < behind; k++)
        if (!number(fixed_types[k], PyTuple_GET_ITEM(fixed, k), &l->fixed[k])) {
            Py_DECREF(capsule);
            return NULL;
        }
    l->function = (void *)(uintptr_t)function;
    l->device = device;
    l->pointers = pointers;
    l->numbers = numbers;
    l->slots = pointers + numbers + behind + 2;
    l->config = (Config){{grid, 1, 1}, {threads, 1, 1}, shared, NULL, cooperative ? &l->cooperative : NULL, cooperative != 0};
    l->cooperative.id = COOPERATIVE;
    l->cooperative.value.integer = 1;
    PyObject *made = PyCFunction_New(&launch_method, capsule);
    Py_DECREF(capsule);
    return made;
}

static void release_batch(PyObject *capsule) {
    Batch *b = PyCapsule_GetPointer(capsule, BATCH);
    if (b->executable) cuda.cuGraphExecDestroy(b->executable);
    if (b->graph) cuda.cuGraphDestroy(b->graph);
    pthread_mutex_destroy(&b->mutex);
    Py_XDECREF(b->functions);
    free(b->launches);
    free(b->nodes);
    free(b->last);
    free(b);
}

static PyMethodDef batch_method = {"launch_batch", (PyCFunction)(void (*)(void))launch_batch, METH_FASTCALL, NULL};

static PyObject *batch(PyObject *module, PyObject *functions) {
    if (!PyTuple_Check(functions)) return PyErr_Format(PyExc_TypeError, "a tuple of launches");
    Batch *b = calloc(1, sizeof *b);
    PyObject *capsule = b ? PyCapsule_New(b, BATCH, release_batch) : NULL;
    if (!capsule) {
        free(b);
        return PyErr_NoMemory();
    }
    pthread_mutex_init(&b->mutex, NULL);
    b->functions = Py_NewRef(functions);
    b->count = PyTuple_GET_SIZE(functions);
    b->launches = calloc((size_t)b->count, sizeof *b->launches);
    b->nodes = calloc((size_t)b->count, sizeof *b->nodes);
    for (Py_ssize_t k = 0; k < b->count; k++) {
        PyObject *function = PyTuple_GET_ITEM(functions, k);
        const Launch *l = launch_of(function);
        if (!l || l->config.count) {
            Py_DECREF(capsule);
            return PyErr_Format(PyExc_TypeError, "%R is no launch that a batch may hold", function);
        }
        b->launches[k] = l;
        b->arguments += arguments_of(l);
        b->slots += l->slots;
    }
    b->last = calloc((size_t)b->slots, sizeof *b->last);
    PyObject *made = PyCFunction_New(&batch_method, capsule);
    Py_DECREF(capsule);
    return made;
}

static PyMethodDef methods[] = {
    {"connect", connect, METH_O, NULL},
    {"load", load, METH_VARARGS, NULL},
    {"resident", resident, METH_VARARGS, NULL},
    {"launcher", launcher, METH_VARARGS, NULL},
    {"batch", batch, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "driver", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_driver(void) {
    data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject *made = data_ptr ? PyModule_Create(&definition) : NULL;
    if (made && (PyModule_AddFunctions(made, nccl_methods) || PyModule_AddFunctions(made, clock_methods) ||
                 PyModule_AddFunctions(made, ordered_methods) || PyModule_AddFunctions(made, repeat_methods)))
        Py_CLEAR(made);
    return made;
}
