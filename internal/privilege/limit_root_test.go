// SPDX-License-Identifier: Apache-2.0

//go:build linux && (root || vm)

package privilege

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
)

// childVariable makes the test binary a process that limits itself to this set, in
// hexadecimal, and prints the status of its threads.
const childVariable = "FAIRLEAD_LIMIT"

func TestMain(m *testing.M) {
	if keep := os.Getenv(childVariable); keep != "" {
		if err := child(keep); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// printOnly has the child print its status alone.
const printOnly = "print"

func child(keep string) error {
	if keep == printOnly {
		return printStatus()
	}
	n, err := strconv.ParseUint(keep, 16, 64)
	if err != nil {
		return err
	}
	for range 8 { // threads that are there before, and that wait in the kernel
		r, w, err := os.Pipe()
		if err != nil {
			return err
		}
		defer w.Close()
		go func() {
			runtime.LockOSThread()
			b := make([]byte, 1)
			_, _ = r.Read(b)
		}()
	}
	if err := Limit(Set(n), Set(n)); err != nil {
		return err
	}
	started := make(chan struct{})
	go func() { // one that is made after
		runtime.LockOSThread()
		started <- struct{}{}
		select {}
	}()
	<-started
	fmt.Println("maps need a capability:", MapsNeedCapability())
	// A program that it starts, as root, gets no more.
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{childVariable + "=" + printOnly}
	cmd.Stdout = os.Stdout
	if err := cmd.Run(); err != nil {
		return err
	}
	return printStatus()
}

func printStatus() error {
	tasks, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil {
		return err
	}
	for _, task := range tasks {
		b, err := os.ReadFile(task)
		if err != nil {
			continue // it has ended
		}
		fmt.Printf("%s\n%s", task, b)
	}
	return nil
}

// Every thread has the capabilities that are kept, and no other in any set.
func TestLimitReachesAllThreads(t *testing.T) {
	keep := SetOf(Agent(), true)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%x", childVariable, uint64(keep)))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	want := map[string]string{
		"CapInh": "0000000000000000", "CapAmb": "0000000000000000", "NoNewPrivs": "1",
		"CapPrm": fmt.Sprintf("%016x", uint64(keep)), "CapEff": fmt.Sprintf("%016x", uint64(keep)),
		"CapBnd": fmt.Sprintf("%016x", uint64(keep)),
	}
	seen := 0
	for line := range strings.Lines(string(out)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if want[key] == "" {
			continue
		}
		seen++
		if got := strings.TrimSpace(value); got != want[key] {
			t.Errorf("%s is %s, want %s", key, got, want[key])
		}
	}
	if seen < 4*len(want) {
		t.Errorf("%d lines, too few\n%s", seen, out)
	}
}

// The kernel's answer does not change what the thread may do.
func TestMapsNeedCapabilityRestores(t *testing.T) {
	read := func() string {
		b, err := os.ReadFile("/proc/thread-self/status")
		if err != nil {
			t.Fatal(err)
		}
		return string(b[strings.Index(string(b), "CapInh"):strings.Index(string(b), "Speculation")])
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	before := read()
	t.Log("maps need a capability:", MapsNeedCapability())
	if after := read(); after != before {
		t.Errorf("before:\n%safter:\n%s", before, after)
	}
}
