// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package engines

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// operations is how many random operations a test does.
func operations(t testing.TB) int {
	t.Helper()
	n, err := strconv.Atoi(os.Getenv("FAIRLEAD_OPERATIONS"))
	if err != nil {
		return 500
	}
	return n
}

// churned is the name of a container that churn works on. It cannot be the prefix of an
// id, as "c1" can: engines accept those where there is no such name.
func churned(n int) string { return fmt.Sprintf("x%d", n) }

// churnFor bounds churn where engines are slow.
const churnFor = 8 * time.Minute

// churn does random operations, a few at once, for some minutes at most. Some fail,
// which is fine; a new container replaces one of the same name. Now and then, and at
// the end, it waits for all of them and calls quiet.
func churn(t testing.TB, draw func(*rand.Rand) []string, do func(args []string) error, quiet func()) {
	t.Helper()
	const workers, batch = 3, 50
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	began, tried, done := time.Now(), 0, atomic.Int64{}
	for left := operations(t); left > 0 && time.Since(began) < churnFor; left -= batch {
		ops := make(chan []string)
		var wg sync.WaitGroup
		for range workers {
			wg.Go(func() {
				for args := range ops {
					if args[0] == "run" {
						_ = do([]string{"rm", "-f", args[slices.Index(args, "--name")+1]})
					}
					if do(args) == nil {
						done.Add(1)
					}
				}
			})
		}
		for range min(left, batch) {
			ops <- draw(rnd)
			tried++
		}
		close(ops)
		wg.Wait()
		quiet()
	}
	t.Logf("%d operations, %d of them done, in %v", tried, done.Load(), time.Since(began).Round(time.Second))
	if done.Load() < int64(tried/5) {
		t.Errorf("only %d of %d operations could be done", done.Load(), tried)
	}
}

// untouched fails the test if a key with this end moved.
func (r *recorder) untouched(t testing.TB, mark int, end string) {
	t.Helper()
	for _, l := range r.since(mark) {
		if strings.HasSuffix(l, end) {
			t.Errorf("what nobody touched moved: %s", l)
		}
	}
}
