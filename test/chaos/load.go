// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"fmt"
	"os"
	"runtime"
	"time"
)

// loadEvery is how often the machine's load is read.
const loadEvery = 5 * time.Second

// loadMeter reads the machine's load, from its beginning until it is stopped.
type loadMeter struct {
	read       func() (float64, error)
	done, over chan struct{}
	samples    []float64 // until over is closed of its goroutine alone, as err
	err        error
}

func newLoadMeter() *loadMeter { return startLoadMeter(readLoad) }

func startLoadMeter(read func() (float64, error)) *loadMeter {
	m := &loadMeter{read: read, done: make(chan struct{}), over: make(chan struct{})}
	go m.run()
	return m
}

func (m *loadMeter) run() {
	defer close(m.over)
	tick := time.NewTicker(loadEvery)
	defer tick.Stop()
	for {
		l, err := m.read()
		if err != nil {
			m.err = err
			return
		}
		m.samples = append(m.samples, l)
		select {
		case <-tick.C:
		case <-m.done:
			return
		}
	}
}

// stop returns what was read.
func (m *loadMeter) stop() (l load, err error) {
	close(m.done)
	<-m.over
	l.Processors = runtime.NumCPU()
	for _, s := range m.samples {
		l.Mean += s / float64(len(m.samples))
		l.Most = max(l.Most, s)
	}
	return l, m.err
}

// readLoad returns the load average of the last minute.
func readLoad() (l float64, err error) {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0, err
	}
	if _, err := fmt.Sscan(string(b), &l); err != nil {
		return 0, fmt.Errorf("/proc/loadavg: %q: %w", b, err)
	}
	return l, nil
}
