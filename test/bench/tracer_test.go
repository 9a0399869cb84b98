// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// trace is what the kernel writes of two listeners. The reader was awake when the first began
// to listen, and something else was sent while the second was on its way.
const trace = `# tracer: nop
#
           bench-100     [000] ..... 10.000100: inet_sock_set_state: family=AF_INET protocol=IPPROTO_TCP sport=20001 dport=0 oldstate=TCP_CLOSE newstate=TCP_LISTEN
        fairlead-200     [001] ..... 10.000090: s1: (0x4d10)
        fairlead-200     [001] ..... 10.000120: s2: (0x4d20)
        fairlead-200     [001] ..... 10.000130: s3: (0x4d30)
        fairlead-200     [001] ..... 10.000140: s4: (0x4d40)
        fairlead-200     [001] ..... 10.000150: s5: (0x4d50)
        fairlead-200     [001] ..... 10.000160: s6: (0x4d60)
        fairlead-200     [001] ..... 10.000170: s7: (0x4d70)
        fairlead-200     [001] ..... 10.000300: s1: (0x4d10)
           bench-100     [000] ..... 11.000000: inet_sock_set_state: family=AF_INET protocol=IPPROTO_TCP sport=20002 dport=0 oldstate=TCP_CLOSE newstate=TCP_LISTEN
        fairlead-200     [001] ..... 11.000010: s1: (0x4d10)
        fairlead-200     [001] ..... 11.000012: s7: (0x4d70)
        fairlead-200     [001] ..... 11.000020: s2: (0x4d20)
        fairlead-200     [001] ..... 11.000030: s3: (0x4d30)
        fairlead-200     [001] ..... 11.000040: s4: (0x4d40)
        fairlead-200     [001] ..... 11.000050: s5: (0x4d50)
        fairlead-200     [001] ..... 11.000060: s6: (0x4d60)
        fairlead-200     [001] ..... 11.000070: s7: (0x4d70)
`

func TestEventIsFollowedThroughTheTrace(t *testing.T) {
	hits, err := readHits(strings.NewReader(trace))
	if err != nil || len(hits) != 18 {
		t.Fatalf("%d hits, error %v", len(hits), err)
	}
	us := func(begin time.Duration, at ...int) (d []time.Duration) {
		for _, n := range at {
			d = append(d, begin+time.Duration(n)*time.Microsecond)
		}
		return d
	}
	for _, c := range []struct {
		a    arrival
		want []time.Duration
	}{
		{arrival{20_001, us(10*time.Second, 200)[0]}, us(10*time.Second, 100, 100, 120, 130, 140, 150, 160, 170, 200)},
		{arrival{20_002, us(11*time.Second, 100)[0]}, us(11*time.Second, 0, 10, 20, 30, 40, 50, 60, 70, 100)},
		{arrival{20_003, us(12*time.Second, 100)[0]}, nil}, // the kernel's event was lost
		{arrival{20_002, us(11*time.Second, 15)[0]}, nil},  // what there is comes after the message
	} {
		if got := passed(hits, c.a); !slices.Equal(got, c.want) {
			t.Errorf("port %d: %v, want %v", c.a.port, got, c.want)
		}
	}
}

func TestBudgetTable(t *testing.T) {
	var samples [][]time.Duration
	for i := range stages() {
		samples = append(samples, []time.Duration{time.Duration(i+1) * time.Microsecond})
	}
	var out strings.Builder
	if err := writeBudget(&out, []string{"a"}, [][][]time.Duration{samples}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"| step ends when | a: p50 | p99 |", "| **all** | 9 µs | 9 µs |", "1 listeners"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, &out)
		}
	}
	if n := strings.Count(out.String(), "\n| "); n != len(stages()) {
		t.Errorf("%d rows, want one for each of %d stages but the first, and their sum:\n%s", n, len(stages()), &out)
	}
}
