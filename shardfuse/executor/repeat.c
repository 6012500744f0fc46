/* Calls of a program that has run on tensors like these: what has to be as it was is compared here, and the program,
   which is Python, is called between.

   ``frontend/repeat.py`` has the same in Python, and what is rare goes there: a thread whose turn it is not yet, the
   first run, which is reported to the other ranks, a run that a profiler records, and what the program raises.  In
   Python, the look-ups of attributes alone take longer than a small kernel.

   The lock of a turn (turns.py) is not taken: a thread that holds it keeps it, and none can take it
   while this code runs, which holds the interpreter's. */

#include "driver.h"
#include <stddef.h>
#include <structmember.h>

/* ``RepeatParts`` of driver.py, in its order. */
enum {
    CHECK, RUN, OTHERWISE, FAILED, CACHE, PROGRAMS, MADE, GROUP, HELD, NOTE, CALL, INPUTS, HAS_GRADIENTS, GIVES_LIST,
    C10D, FORWARD_AD, IS_GRAD_ENABLED, SET_GRAD_ENABLED, CURRENT_THREAD, IS_OF_AUTOGRAD, GO_ON, PROFILER, PARTS
};

enum { NAMES = 17 };
static struct {
    PyObject *programs, *last_made, *world, *default_pg, *level, *turn, *team, *told, *number, *is_new;
    PyObject *lock, *locked, *refused, *inside, *owner, *depth, *is_profiling;
} named;
static const char *const WORDS[NAMES] = {
    "programs", "last_made", "_world", "default_pg", "_current_level", "turn", "team", "told", "number", "is_new",
    "_lock", "locked", "_refused", "_inside", "_owner", "_depth", "_is_profiler_enabled",
};

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *parts[PARTS];
} Repeat;

/* 1 or 0, or -1 with an error; the reference is taken. */
static int is_true(PyObject *found) {
    int is = found ? PyObject_IsTrue(found) : -1;
    Py_XDECREF(found);
    return is;
}

/* Is the attribute this very object? */
static int is_attribute(PyObject *of, PyObject *name, const PyObject *wanted) {
    PyObject *found = PyObject_GetAttr(of, name);
    if (!found) return -1;
    Py_DECREF(found);
    return found == wanted;
}

static int set(PyObject *function, PyObject *value) {
    PyObject *done = PyObject_CallOneArg(function, value);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int is_list(PyObject *inputs) { return PyTuple_CheckExact(inputs) || PyList_CheckExact(inputs); }

/* Are these tensors like those of the call before, of none of which a gradient is to be recorded? */
static int are_alike(PyObject *const *parts, PyObject *inputs) {
    Py_ssize_t count = PySequence_Fast_GET_SIZE(inputs);
    if (count != PyLong_AsSsize_t(parts[INPUTS])) return 0;
    if (parts[CHECK] == Py_None) return 1;
    int are = is_true(PyObject_Vectorcall(parts[CHECK], PySequence_Fast_ITEMS(inputs), (size_t)count, NULL));
    if (are <= 0 || parts[HAS_GRADIENTS] != Py_True) return are;
    int is_recording = is_true(PyObject_CallNoArgs(parts[IS_GRAD_ENABLED]));
    return is_recording < 0 ? -1 : !is_recording;
}

/* Is the process's default group the one that the program was made in?  It is known weakly. */
static int is_same_world(PyObject *const *parts) {
    PyObject *group = parts[GROUP] == Py_None ? Py_None : PyWeakref_GetObject(parts[GROUP]);
    PyObject *world = group ? PyObject_GetAttr(parts[C10D], named.world) : NULL;
    int is = world ? is_attribute(world, named.default_pg, group) : -1;
    Py_XDECREF(world);
    return is > 0 && group == Py_None ? parts[GROUP] == Py_None : is; /* a group that is gone reads as None, too */
}

static int has_no_tangents(PyObject *const *parts) {
    PyObject *level = PyObject_GetAttr(parts[FORWARD_AD], named.level);
    long found = level ? PyLong_AsLong(level) : -1;
    Py_XDECREF(level);
    return PyErr_Occurred() ? -1 : found < 0;
}

/* Is everything as it was? */
static int is_known(PyObject *const *parts, PyObject *inputs) {
    int is = is_list(inputs);
    if (is > 0) is = are_alike(parts, inputs);
    if (is > 0) is = is_attribute(parts[CACHE], named.programs, parts[PROGRAMS]);
    if (is > 0) is = is_same_world(parts);
    if (is > 0) is = has_no_tangents(parts);
    return is;
}

/* No thread holds the lock, none was refused, and none but this one is inside: what lets it in at once. */
static int is_free(PyObject *turn, PyObject *thread) {
    PyObject *lock = PyObject_GetAttr(turn, named.lock);
    int is_held = lock ? is_true(PyObject_CallMethodNoArgs(lock, named.locked)) : -1;
    Py_XDECREF(lock);
    if (is_held) return is_held < 0 ? -1 : 0;
    int is = is_attribute(turn, named.refused, Py_None);
    if (is <= 0) return is;
    is = is_attribute(turn, named.inside, Py_None);
    return is ? is : is_attribute(turn, named.inside, thread);
}

/* Is this its owner, or a thread that acts for the owner? */
static int is_owners(PyObject *const *parts, PyObject *turn, PyObject *thread) {
    int is = is_attribute(turn, named.owner, thread);
    return is ? is : is_true(PyObject_CallOneArg(parts[IS_OF_AUTOGRAD], thread));
}

/* Do the other ranks know whose turn it is, and have they looked whose it was elsewhere? */
static int is_told(PyObject *held, PyObject *turn) {
    PyObject *told = PyObject_GetAttr(held, named.told), *number = told ? PyObject_GetAttr(turn, named.number) : NULL;
    int is = number ? PyObject_RichCompareBool(told, number, Py_EQ) : -1;
    Py_XDECREF(told);
    Py_XDECREF(number);
    if (is <= 0) return is;
    PyObject *team = PyObject_GetAttr(held, named.team);
    is = team ? is_attribute(team, named.is_new, Py_False) : -1;
    Py_XDECREF(team);
    return is;
}

/* How many programs the thread that is inside is in, after one more (by 1) or less (by -1). */
static long deepen(PyObject *turn, int by) {
    PyObject *depth = PyObject_GetAttr(turn, named.depth);
    long found = depth ? PyLong_AsLong(depth) + by : -1;
    Py_XDECREF(depth);
    PyObject *made = PyErr_Occurred() ? NULL : PyLong_FromLong(found);
    int failed = !made || PyObject_SetAttr(turn, named.depth, made);
    Py_XDECREF(made);
    return failed ? -1 : found;
}

/* What ``Held.__enter__`` does where nothing has changed: 1; 0 where that itself has to be asked. */
static int enter(PyObject *const *parts, PyObject *turn) {
    PyObject *thread = PyObject_CallNoArgs(parts[CURRENT_THREAD]);
    int is = thread ? is_owners(parts, turn, thread) : -1;
    if (is > 0) is = is_told(parts[HELD], turn);
    if (is > 0) is = is_free(turn, thread); /* last: what is asked before may be Python, where another thread goes on */
    if (is > 0 && (PyObject_SetAttr(turn, named.inside, thread) || deepen(turn, 1) < 0)) is = -1;
    Py_XDECREF(thread);
    return is;
}

/* What ``Held.__exit__`` does: None, or the name of a thread that was refused meanwhile. */
static PyObject *leave(PyObject *turn) {
    PyObject *refused = PyObject_GetAttr(turn, named.refused);
    long depth = refused ? deepen(turn, -1) : -1;
    if (depth < 0 || (!depth && PyObject_SetAttr(turn, named.inside, Py_None))) Py_CLEAR(refused);
    return refused;
}

/* The results of the program. */
static PyObject *run(PyObject *const *parts, PyObject *inputs) {
    if (PyObject_SetAttr(parts[CACHE], named.last_made, parts[MADE])) return NULL;
    if (parts[NOTE] != Py_None && set(parts[NOTE], parts[CALL])) return NULL;
    size_t count = (size_t)PySequence_Fast_GET_SIZE(inputs);
    return PyObject_Vectorcall(parts[RUN], PySequence_Fast_ITEMS(inputs), count, NULL);
}

/* The same while no gradients are recorded, which are recorded again afterwards where they were. */
static PyObject *run_unrecorded(PyObject *const *parts, PyObject *inputs) {
    int is_recording = is_true(PyObject_CallNoArgs(parts[IS_GRAD_ENABLED]));
    if (is_recording < 0 || (is_recording && set(parts[SET_GRAD_ENABLED], Py_False))) return NULL;
    PyObject *found = run(parts, inputs), *type, *value, *traceback;
    if (!is_recording) return found;
    PyErr_Fetch(&type, &value, &traceback);
    if (set(parts[SET_GRAD_ENABLED], Py_True)) {
        Py_CLEAR(found);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
    } else {
        PyErr_Restore(type, value, traceback);
    }
    return found;
}

/* Have ``failed(inputs, error, is_programs)`` raise the error in the words that a caller sees.  is_programs: has the
   program itself raised it? */
static PyObject *fail(PyObject *const *parts, PyObject *inputs, int is_programs) {
    PyObject *type, *error, *traceback;
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return NULL;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback) PyException_SetTraceback(error, traceback);
    PyObject *arguments[] = {inputs, error, is_programs ? Py_True : Py_False};
    PyObject *found = PyObject_Vectorcall(parts[FAILED], arguments, 3, NULL);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return found;
}

/* Raise where other ranks may have paired the run with one of the thread that was refused. */
static int go_on(PyObject *const *parts, PyObject *refused) {
    PyObject *arguments[] = {parts[HELD], refused}, *done = PyObject_Vectorcall(parts[GO_ON], arguments, 2, NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* The results, in this thread's turn; None where something is not as it was. */
static PyObject *run_in_turn(PyObject *const *parts, PyObject *inputs) {
    if (parts[HELD] == Py_None) {
        PyObject *found = run_unrecorded(parts, inputs);
        return found ? found : fail(parts, inputs, 1);
    }
    PyObject *turn = PyObject_GetAttr(parts[HELD], named.turn), *found = NULL;
    int entered = turn ? enter(parts, turn) : -1;
    if (entered > 0) {
        found = run_unrecorded(parts, inputs);
        int is_programs = !found;
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        PyObject *refused = leave(turn);
        if (found && refused != Py_None && (!refused || go_on(parts, refused))) Py_CLEAR(found);
        Py_XDECREF(refused);
        if (type) PyErr_Restore(type, value, traceback); /* in place of an error in leaving */
        if (!found) found = fail(parts, inputs, is_programs);
    } else if (!entered) {
        found = PyObject_CallOneArg(parts[OTHERWISE], inputs);
    }
    Py_XDECREF(turn);
    return found;
}

static PyObject *call_repeat(PyObject *self, PyObject *const *given, size_t flags, PyObject *keywords) {
    PyObject *const *parts = ((Repeat *)self)->parts;
    if (PyVectorcall_NARGS(flags) != 1 || (keywords && PyTuple_GET_SIZE(keywords)))
        return PyErr_Format(PyExc_TypeError, "a repeated call takes its inputs, one list of them");
    int is = is_known(parts, given[0]);
    if (is <= 0) return is ? NULL : Py_NewRef(Py_None);
    is = is_attribute(parts[PROFILER], named.is_profiling, Py_False);
    if (is <= 0) return is ? NULL : PyObject_CallOneArg(parts[OTHERWISE], given[0]);
    PyObject *found = run_in_turn(parts, given[0]);
    if (!found || found == Py_None || parts[GIVES_LIST] != Py_True) return found;
    PyObject *list = PySequence_List(found);
    Py_DECREF(found);
    return list;
}

static int traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    for (int k = 0; k < PARTS; k++) Py_VISIT(((Repeat *)self)->parts[k]);
    return 0;
}

static int clear(PyObject *self) {
    for (int k = 0; k < PARTS; k++) Py_CLEAR(((Repeat *)self)->parts[k]);
    return 0;
}

static void release(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Repeat, call), READONLY, NULL}, {0}};
static PyType_Slot slots[] = {
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_dealloc, release},
    {Py_tp_members, members},
    {0, NULL},
};
static PyType_Spec spec = {
    "driver.Repeat", sizeof(Repeat), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots,
};
static PyTypeObject *type;

/* The words and the type, which are made once. */
static int prepare(void) {
    if (type) return 0;
    for (int k = 0; k < NAMES; k++)
        if (!(((PyObject **)&named)[k] = PyUnicode_InternFromString(WORDS[k]))) return -1;
    type = (PyTypeObject *)PyType_FromSpec(&spec);
    return type ? 0 : -1;
}

static PyObject *repeat(PyObject *module, PyObject *parts) {
    if (prepare()) return NULL;
    if (!PyTuple_Check(parts) || PyTuple_GET_SIZE(parts) != PARTS)
        return PyErr_Format(PyExc_TypeError, "a repeated call is made of a tuple of %d parts", PARTS);
    Repeat *made = PyObject_GC_New(Repeat, type);
    if (!made) return NULL;
    made->call = call_repeat;
    for (int k = 0; k < PARTS; k++) made->parts[k] = Py_NewRef(PyTuple_GET_ITEM(parts, k));
    PyObject_GC_Track((PyObject *)made);
    return (PyObject *)made;
}

PyMethodDef repeat_methods[] = {
    {"repeat", repeat, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
