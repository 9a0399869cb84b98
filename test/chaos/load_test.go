// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestLoadOfARun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		loads := []float64{1, 2, 6}
		m := startLoadMeter(func() (float64, error) {
			l := loads[0]
			loads = loads[1:]
			return l, nil
		})
		time.Sleep(2*loadEvery + loadEvery/2)
		l, err := m.stop()
		if l.Mean != 3 || l.Most != 6 || l.Processors < 1 || err != nil {
			t.Errorf("%+v, %v", l, err)
		}
	})
}

func TestLoadThatCannotBeRead(t *testing.T) {
	failed := errors.New("failed")
	if _, err := startLoadMeter(func() (float64, error) { return 0, failed }).stop(); !errors.Is(err, failed) {
		t.Error(err)
	}
}

func TestLoadOfThisMachine(t *testing.T) {
	l, err := newLoadMeter().stop()
	if l.Mean < 0 || err != nil {
		t.Errorf("%+v, %v", l, err)
	}
}
