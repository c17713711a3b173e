/* The agreement of N ranks (docs/protocol.md) on two requests. Each rank submits A, B, both or none,
   in any order and at any time, A with one of two signatures, and then leaves, joins or hangs.
   Checked in all interleavings: what runs does so on all ranks alike, all that is submitted ends,
   and if all ranks submit the same, all of it runs. Prints each negotiation's reports and decision,
   which replay_test compares with decide(). */
#define A 1
#define B 2
#define JOIN 3
#define NOBODY 9

byte queue[N * 3], length[N];  /* what is pending, oldest first */
bit signature[N], leaves[N], late[N], submitted[N * 3], ended[N * 3], ran[3];
bit waited, idle, negotiates, stopped, hung;
byte programs = N;

/* For the d_steps below. */
byte r, i, k, head;
bit equal, complete, has, some, all_late, left, mismatch, stuck;
byte runs[2], refused[2], run_count, refused_count, seen;

#define joined(x) (queue[3*(x)] == JOIN || queue[3*(x)+1] == JOIN || queue[3*(x)+2] == JOIN)
#define pends(x, y) (queue[3*(x)] == (y) || queue[3*(x)+1] == (y) || queue[3*(x)+2] == (y))

inline take(x, y) {
  if
  :: queue[3*(x)] == (y) -> queue[3*(x)] = queue[3*(x)+1]; queue[3*(x)+1] = queue[3*(x)+2]; queue[3*(x)+2] = 0; length[x]--
  :: else ->
    if
    :: queue[3*(x)+1] == (y) -> queue[3*(x)+1] = queue[3*(x)+2]; queue[3*(x)+2] = 0; length[x]--
    :: else ->
      if
      :: queue[3*(x)+2] == (y) -> queue[3*(x)+2] = 0; length[x]--
      :: else
      fi
    fi
  fi
}

inline submit(x, y) {
  d_step {
    if
    :: y != JOIN -> submitted[3*(x)+(y)] = 1
    :: else
    fi;
    if
    :: stopped ->
      if
      :: y != JOIN -> ended[3*(x)+(y)] = 1
      :: else
      fi
    :: else -> queue[3*(x)+length[x]] = y; length[x]++; idle = 0; late[x] = 0
    fi
  }
}

proctype program(byte me) {
  byte first;
  if
  :: signature[me] = 0
  :: signature[me] = 1
  fi;
  if
  :: first = A
  :: first = B
  :: first = 0
  fi;
  if
  :: first > 0 ->
    submit(me, first);
    if
    :: submit(me, 3 - first)
    :: skip
    fi
  :: else
  fi;
  if
  :: d_step { leaves[me] = 1; idle = 0 }
  :: submit(me, JOIN)
  :: d_step { hung = 1 }
  fi;
  programs--
}

/* All ranks serve or fail a request together. */
inline end_request(y, runs_it) {
  k = 0;
  do
  :: k < N ->
    if
    :: runs_it && y != JOIN ->
      assert(pends(k, y) || joined(k));
      assert(!ran[y]);
    :: else
    fi;
    if
    :: pends(k, y) && y != JOIN -> assert(!ended[3*k+y]); ended[3*k+y] = 1
    :: else
    fi;
    take(k, y);
    late[k] = 0;
    k++
  :: else -> break
  od;
  if
  :: runs_it && y != JOIN -> ran[y] = 1
  :: else
  fi;
  waited = 0
}

inline fail_all() {
  i = A;
  do
  :: i <= JOIN -> end_request(i, 0); i++
  :: else -> break
  od
}

/* One identity that some rank has: whether it runs or is refused. */
inline judge(y) {
  complete = 1; some = 0; equal = 1; head = 0; k = 0;
  do
  :: k < N ->
    if
    :: pends(k, y) ->
      if
      :: some && y == A && signature[k] != head -> equal = 0
      :: !some -> some = 1; head = signature[k]
      :: else
      fi
    :: else ->
      if
      :: !joined(k) -> complete = 0
      :: else
      fi
    fi;
    k++
  :: else -> break
  od;
  if
  :: complete && equal -> runs[run_count] = y; run_count++
  :: complete && !equal -> refused[refused_count] = y; refused_count++
  :: else
  fi
}

inline decide() {
  run_count = 0; refused_count = 0; seen = 0; left = 0; mismatch = 0; stuck = 0;
  r = 0;
  do  /* in the order of the first rank that has it */
  :: r < N ->
    i = 0;
    do
    :: i < 3 ->
      if
      :: queue[3*r+i] > 0 && queue[3*r+i] != JOIN && !(seen & queue[3*r+i]) ->
        seen = seen | queue[3*r+i];
        judge(queue[3*r+i])
      :: else
      fi;
      i++
    :: else -> break
    od;
    r++
  :: else -> break
  od;
  if
  :: run_count + refused_count == 0 ->
    r = 0; all_late = 1;
    do
    :: r < N ->
      if
      :: !late[r] || length[r] == 0 -> all_late = 0
      :: else
      fi;
      i = 0;
      do
      :: leaves[r] && i < 3 * N ->
        if
        :: queue[i] > 0 && !pends(r, queue[i]) -> left = 1
        :: else
        fi;
        i++
      :: else -> break
      od;
      r++
    :: else -> break
    od;
    if
    :: left
    :: !left && all_late -> mismatch = 1
    :: !left && !all_late && waited -> stuck = 1
    :: else
    fi
  :: else
  fi;
  r = 0;
  printf("negotiation");
  do
  :: r < N ->
    printf(" %d%d%d%d%d%d", queue[3*r], queue[3*r+1], queue[3*r+2], signature[r], leaves[r], late[r]);
    r++
  :: else -> break
  od;
  printf(" %d :", waited);
  r = 0;
  do
  :: r < run_count -> printf(" run %d", runs[r]); r++
  :: else -> break
  od;
  r = 0;
  do
  :: r < refused_count -> printf(" refuse %d", refused[r]); r++
  :: else -> break
  od;
  if
  :: left -> printf(" left\n")
  :: mismatch -> printf(" mismatch\n")
  :: stuck -> printf(" stuck\n")
  :: else -> printf("\n")
  fi
}

#define come(x) (length[x] > 0 || leaves[x])
#if N == 2
#define all_come (come(0) && come(1))
#define pending (length[0] + length[1])
#else
#define all_come (come(0) && come(1) && come(2))
#define pending (length[0] + length[1] + length[2])
#endif

init {
  atomic {
    r = 0;
    do
    :: r < N -> run program(r); r++
    :: else -> break
    od
  };
  do
  :: !stopped && !negotiates && !idle && all_come -> /* propose */
    d_step {
      equal = 1; r = 1;
      do
      :: r < N ->
        if
        :: queue[3*r] != queue[0] || (queue[0] == A && signature[r] != signature[0]) -> equal = 0
        :: else
        fi;
        r++
      :: else -> break
      od;
      if
      :: equal && queue[0] == 0 -> stopped = 1
      :: equal && queue[0] > 0 -> head = queue[0]; end_request(head, 1)
      :: else -> negotiates = 1
      fi
    }
  :: negotiates -> /* with what has come meanwhile */
    d_step {
      decide();
      negotiates = 0;
      idle = (run_count + refused_count == 0 && !left && !mismatch && !stuck);
      r = 0;
      do
      :: r < refused_count -> end_request(refused[r], 0); r++
      :: else -> break
      od;
      r = 0;
      do
      :: r < run_count -> end_request(runs[r], 1); r++
      :: else -> break
      od;
      if
      :: mismatch || left || stuck -> fail_all()
      :: else
      fi;
      if
      :: left || stuck -> stopped = 1
      :: else
      fi
    }
  :: timeout -> /* nothing else happens: a deadline passes, or it is over */
    if
    :: stopped || pending == 0 -> break
    :: !stopped && idle ->
      if
      :: !late[0] -> late[0] = 1
      :: !late[1] -> late[1] = 1
      :: !late[N-1] -> late[N-1] = 1
      :: !waited -> waited = 1
      :: waited -> assert(0) /* is over without an end */
      fi;
      idle = 0
    :: !stopped && pending > 0 && !idle -> /* a rank does not come: all abort */
      d_step { fail_all(); stopped = 1 }
    fi
  od;
  skip;
  d_step {
    assert(programs == 0);
    complete = 1; r = 0;
    do
    :: r < N ->
      assert(ended[3*r+A] == submitted[3*r+A]);
      assert(ended[3*r+B] == submitted[3*r+B]);
      complete = complete && submitted[3*r+A] && submitted[3*r+B] && signature[r] == signature[0];
      r++
    :: else -> break
    od;
    assert(!complete || (ran[A] && ran[B]))
  }
}
